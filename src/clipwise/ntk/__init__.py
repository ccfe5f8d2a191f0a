"""The neural tangent kernel of private training: kernels, positivity, the rate of the loss, gradient flows, a monitor.

Sections 3 and 4 of the paper. Clipping turns the kernel H = (df/dw)(df/dw)^T into H C (flat) or sum_r H_r C_r
(layerwise), and the loss obeys dL/dt = -(dL/df) H C (dL/df)^T. That matrix determines convergence.
"""

from clipwise.ntk.analysis import NTKAnalysis, Properties, analyse, properties
from clipwise.ntk.dynamics import Descent, descent, loss_rate, measured_loss_rate
from clipwise.ntk.flow import (
    AdaGradFlow,
    AdamFlow,
    GdFlow,
    GradientFlow,
    HeavyBallFlow,
    NesterovFlow,
    RMSpropFlow,
    gradient_flow,
)
from clipwise.ntk.kernels import clipped_kernel, kernel, layer_kernels
from clipwise.ntk.monitor import NOT_COVERED, NTKMonitor, NTKRecord
from clipwise.ntk.network import Inputs, LossFunction, map_inputs

__all__ = [
    "NOT_COVERED",
    "AdaGradFlow",
    "AdamFlow",
    "Descent",
    "GdFlow",
    "GradientFlow",
    "HeavyBallFlow",
    "Inputs",
    "LossFunction",
    "NTKAnalysis",
    "NTKMonitor",
    "NTKRecord",
    "NesterovFlow",
    "Properties",
    "RMSpropFlow",
    "analyse",
    "clipped_kernel",
    "descent",
    "gradient_flow",
    "kernel",
    "layer_kernels",
    "loss_rate",
    "map_inputs",
    "measured_loss_rate",
    "properties",
]
