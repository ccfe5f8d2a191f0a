"""The mathematics under the accountants: laws of losses, their moments, and the integrals over them."""
