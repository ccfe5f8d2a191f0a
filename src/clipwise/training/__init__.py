"""From a configuration to a run's folder: read strictly (`config`), train (`train`), keep (`clipwise.report`).

One configuration is one run. What differs between algorithms is in `algorithms`; everything here uses the same public
values as a user's own loop does.
"""
