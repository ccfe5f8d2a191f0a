"""Tables, recommenders, flows, reinforcement learning, and networks for the sciences."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.zoo.case import class_loss, floats, ids, regress

from .row import Row, columns, first, on_x, plain, thing

TABLE = columns(x=floats(6), c=ids(4, 3), y=ids(2))
NUMBERS = columns(x=floats(6))
POINTS = columns(x=floats(4))
CLICKS = columns(c=ids(10, 3), x=floats(2), y=ids(2))
STATES = columns(s=floats(4), a=ids(2), advantage=floats(), ret=floats(), old=floats())


def local(path: str) -> str:
    return f"{__name__}.{path}"


def numbers_and_categories(model: nn.Module, batch: Any) -> Tensor:
    return regress(model(batch["x"], batch["c"]))


def categories_and_numbers(model: nn.Module, batch: Any) -> Tensor:
    return regress(model(batch["c"], batch["x"]))


def log_likelihood(model: nn.Module, batch: Any) -> Tensor:
    """Flows of nflows and normflows."""
    return -model.log_prob(batch["x"])


def lazy_log_likelihood(model: nn.Module, batch: Any) -> Tensor:
    """Flows of zuko: the model gives a distribution."""
    return -model().log_prob(batch["x"])


def invertible(model: nn.Module, batch: Any) -> Tensor:
    z, log_determinant = model(batch["x"])
    return z.square().sum(1) / 2 - log_determinant


def click(model: nn.Module, batch: Any) -> Tensor:
    columns = torch.cat([batch["c"].to(batch["x"].dtype), batch["x"]], 1)
    return nn.functional.binary_cross_entropy(model(columns).squeeze(1), batch["y"].to(columns.dtype), reduction="none")


def surrogate(model: nn.Module, batch: Any) -> Tensor:
    """PPO's loss with advantages that came with the records."""
    return ppo(model, batch, batch["advantage"])


def surrogate_normalized(model: nn.Module, batch: Any) -> Tensor:
    """PPO's loss as most scripts write it: advantages normalised over the batch."""
    a = batch["advantage"]
    return ppo(model, batch, (a - a.mean()) / (a.std() + 1e-8) if len(a) > 1 else a)


def ppo(model: Any, batch: Any, advantage: Tensor) -> Tensor:
    value, log_prob, entropy = model.evaluate_actions(batch["s"], batch["a"])
    ratio = (log_prob - batch["old"].clamp(-1.2, -0.2)).exp()
    clipped = torch.min(advantage * ratio, advantage * ratio.clamp(0.8, 1.2))
    return -clipped + 0.5 * (batch["ret"] - value.flatten()).square() - 0.01 * entropy


def action_values(model: nn.Module, batch: Any) -> Tensor:
    return (first(model(batch["s"])).gather(1, batch["a"][:, None]).squeeze(1) - batch["ret"]).square()


def policy() -> nn.Module:
    """stable-baselines3's actor-critic network."""
    spaces = thing("gymnasium.spaces.Box"), thing("gymnasium.spaces.Discrete")
    made: nn.Module = thing("stable_baselines3.common.policies.ActorCriticPolicy")(
        spaces[0](-10, 10, (4,)), spaces[1](2), lambda _: 0.1, net_arch=[12]
    )
    return made


def clicks_model(name: str) -> nn.Module:
    """A model of deepctr-torch on three categories and two numbers."""
    inputs = thing("deepctr_torch.inputs.SparseFeat"), thing("deepctr_torch.inputs.DenseFeat")
    features = [inputs[0](f"c{k}", 10, embedding_dim=4) for k in range(3)] + [inputs[1](f"x{k}", 1) for k in range(2)]
    made: nn.Module = thing(f"deepctr_torch.models.{name}")(features, features, dnn_hidden_units=(8, 8), init_std=0.3)
    return made


def real_nvp(act_norm: bool) -> nn.Module:
    nf = thing("normflows.flows.AffineCouplingBlock"), thing("normflows.nets.MLP"), thing("normflows.flows.Permute")
    flows: list[Any] = []
    for _ in range(2):
        flows += [nf[0](nf[1]([2, 8, 4], init_zeros=True)), nf[2](4, mode="swap")]
        if act_norm:
            flows.append(thing("normflows.flows.ActNorm")(4))
    made: nn.Module = thing("normflows.NormalizingFlow")(thing("normflows.distributions.DiagGaussian")(4), flows)
    return made


def spline_flow() -> nn.Module:
    layer = thing("normflows.flows.AutoregressiveRationalQuadraticSpline")
    base = thing("normflows.distributions.DiagGaussian")(4, trainable=False)
    made: nn.Module = thing("normflows.NormalizingFlow")(base, [layer(4, 1, 8), layer(4, 1, 8)])
    return made


def nflows_act_norm() -> nn.Module:
    transforms = [thing("nflows.transforms.ActNorm")(4), thing("nflows.transforms.LULinear")(4)]
    base = thing("nflows.distributions.StandardNormal")([4])
    made: nn.Module = thing("nflows.flows.Flow")(thing("nflows.transforms.CompositeTransform")(transforms), base)
    return made.train()


class Training(nn.Module):
    """A flow that stays in training mode."""

    def __init__(self, which: str) -> None:
        super().__init__()
        self.flow = nflows_act_norm() if which == "nflows" else real_nvp(True)

    def train(self, mode: bool = True) -> Any:
        return super().train(True)

    def log_prob(self, x: Tensor) -> Tensor:
        out: Tensor = self.flow.log_prob(x)
        return out


def freia() -> nn.Module:
    net = thing("FrEIA.framework.SequenceINN")(4)
    for _ in range(2):
        net.append(
            thing("FrEIA.modules.AllInOneBlock"),
            subnet_constructor=lambda a, b: nn.Sequential(nn.Linear(a, 8), nn.ReLU(), nn.Linear(8, b)),
        )
    made: nn.Module = net
    return made


class Molecule(nn.Module):
    """e3nn's tensor product of point features with the spherical harmonics of their positions."""

    def __init__(self) -> None:
        super().__init__()
        irreps = thing("e3nn.o3.Irreps")
        self.harmonics = irreps.spherical_harmonics(2)
        inner = irreps("4x0e + 2x1o + 1x2e")
        product = thing("e3nn.o3.FullyConnectedTensorProduct")
        self.first = product(irreps("3x0e"), self.harmonics, inner)
        self.second = product(inner, self.harmonics, irreps("2x0e"))
        self.linear = thing("e3nn.o3.Linear")(inner, inner)

    def forward(self, x: Tensor) -> Tensor:
        positions, features = x[..., :3], x[..., 3:]
        harmonics = thing("e3nn.o3.spherical_harmonics")(self.harmonics, positions, normalize=True)
        out: Tensor = self.second(self.linear(self.first(features, harmonics)), harmonics).mean(1)
        return out


class Dynamics(nn.Module):
    """A neural differential equation, solved with a fixed step by torchdiffeq."""

    def __init__(self, adjoint: bool) -> None:
        super().__init__()
        self.field = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
        self.solve = "odeint_adjoint" if adjoint else "odeint"

    def forward(self, x: Tensor) -> Tensor:
        field = Field(self.field)
        times = torch.linspace(0, 1, 4, dtype=x.dtype)
        out: Tensor = thing(f"torchdiffeq.{self.solve}")(field, x, times, method="rk4")[-1]
        return out


class Field(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        out: Tensor = self.inner(y)
        return out


def tabnet_losses(model: nn.Module, batch: Any) -> Tensor:
    return class_loss(model(batch["x"])[0], batch["y"])


class TabNetTraining(nn.Module):
    """TabNet in training mode, as the package trains it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = thing("pytorch_tabnet.tab_network.TabNet")(6, 3, n_d=4, n_a=4, n_steps=2, **GROUPS)

    def train(self, mode: bool = True) -> Any:
        return super().train(True)

    def forward(self, x: Tensor) -> Any:
        return self.net(x)


GROUPS = {"group_attention_matrix": torch.eye(6)}
TABULAR: dict[str, Any] = dict(categories=(4, 4, 4), num_continuous=6, dim=8, depth=2, heads=2, dim_head=4)

TABLES = [
    plain("tabnet_eval", "pytorch_tabnet.tab_network.TabNet", 6, 3, records=TABLE, losses=tabnet_losses, n_d=4, n_a=4,
          n_steps=2, single=True, **GROUPS),
    plain("tabnet_training", local("TabNetTraining"), package="pytorch_tabnet", records=TABLE, losses=tabnet_losses,
          single=True, mixes="ghost BatchNorm in training mode"),
    plain("tab_transformer", "tab_transformer_pytorch.TabTransformer", records=TABLE, losses=categories_and_numbers,
          mlp_act=nn.ReLU(), **TABULAR),
    plain("ft_transformer_lucid", "tab_transformer_pytorch.FTTransformer", records=TABLE,
          losses=categories_and_numbers, **TABULAR),
    plain("ft_transformer_rtdl", "rtdl_revisiting_models.FTTransformer", records=TABLE, losses=numbers_and_categories,
          n_cont_features=6, cat_cardinalities=[4, 4, 4], d_out=2, n_blocks=2, d_block=8, attention_n_heads=2,
          attention_dropout=0.0, ffn_d_hidden_multiplier=2.0, ffn_dropout=0.0, residual_dropout=0.0),
    plain("mlp_rtdl", "rtdl_revisiting_models.MLP", records=NUMBERS, d_in=6, d_out=2, n_blocks=2, d_block=8,
          dropout=0.0),
    plain("resnet_rtdl_eval", "rtdl_revisiting_models.ResNet", records=NUMBERS, d_in=6, d_out=2, n_blocks=2,
          d_block=8, d_hidden_multiplier=2.0, dropout1=0.0, dropout2=0.0),
    plain("periodic_embeddings", "rtdl_num_embeddings.PeriodicEmbeddings", 6, 8, records=NUMBERS, lite=False),
    plain("tabm", "tabm.TabM", records=NUMBERS, n_num_features=6, d_out=2, n_blocks=2, d_block=8, dropout=0.0, k=4,
          start_scaling_init="random-signs"),
]  # fmt: skip

CLICK = [
    plain(f"deepctr_{name.lower()}", local("clicks_model"), name, package="deepctr_torch", records=CLICKS, losses=click)
    for name in ("DeepFM", "xDeepFM", "DCN", "DCNMix", "AutoInt", "NFM", "WDL", "FiBiNET", "IFM", "DIFM")
]

FLOWS = [
    plain("nflows_maf", "nflows.flows.MaskedAutoregressiveFlow", 4, 8, 2, 1, records=POINTS, losses=log_likelihood),
    plain("nflows_real_nvp", "nflows.flows.SimpleRealNVP", 4, 8, 2, 1, records=POINTS, losses=log_likelihood),
    plain("nflows_act_norm_first_batch", local("Training"), "nflows", package="nflows", records=POINTS,
          losses=log_likelihood,
          mixes="ActNorm takes its weights from the statistics of the first batch"),
    plain("normflows_real_nvp", local("real_nvp"), False, package="normflows", records=POINTS, losses=log_likelihood),
    plain("normflows_spline", local("spline_flow"), package="normflows", records=POINTS, losses=log_likelihood),
    plain("normflows_act_norm_first_batch", local("Training"), "normflows", package="normflows", records=POINTS,
          losses=log_likelihood,
          mixes="ActNorm takes its weights from the statistics of the first batch"),
    plain("zuko_nsf", "zuko.flows.NSF", 4, records=POINTS, losses=lazy_log_likelihood, transforms=2,
          hidden_features=(8,)),
    plain("zuko_maf", "zuko.flows.MAF", 4, records=POINTS, losses=lazy_log_likelihood, transforms=2,
          hidden_features=(8,)),
    plain("zuko_sospf", "zuko.flows.SOSPF", 4, records=POINTS, losses=lazy_log_likelihood, transforms=1,
          hidden_features=(8,)),
    plain("freia", local("freia"), package="FrEIA", records=POINTS, losses=invertible),
]  # fmt: skip

CONTROL = [
    plain("ppo_own_advantages", local("policy"), package="stable_baselines3", records=STATES, losses=surrogate,
          single=True),
    plain("ppo_normalized_advantages", local("policy"), package="stable_baselines3", records=STATES,
          losses=surrogate_normalized, single=True, mixes="advantages are normalised over the batch"),
    plain("torchrl_mlp_values", "torchrl.modules.MLP", records=STATES, losses=action_values, in_features=4,
          out_features=2, depth=2, num_cells=8),
    plain("torchrl_noisy_layer", "torchrl.modules.NoisyLinear", 4, 2, records=STATES, losses=action_values),
]  # fmt: skip

SCIENCE = [
    plain("kan", "kan.KAN", records=POINTS, width=[4, 3, 2], grid=3, k=3, auto_save=False, save_act=False,
          symbolic_enabled=False),
    plain("e3nn_tensor_products", local("Molecule"), package="e3nn", records=columns(x=floats(5, 6))),
    plain("egnn", "egnn_pytorch.EGNN_Network", records=columns(z=ids(9, 5), x=floats(5, 3)),
          losses=lambda model, batch: regress(model(batch["z"], batch["x"])[0]), depth=2, dim=8, num_tokens=10),
    plain("graph_transformer_lucid", "graph_transformer_pytorch.GraphTransformer",
          records=columns(x=floats(5, 8), edges=floats(5, 5, 4)),
          losses=lambda model, batch: regress(model(batch["x"], batch["edges"])[0]), dim=8, depth=1, dim_head=4,
          edge_dim=4, heads=2, with_feedforwards=True),
    plain("siren", "siren_pytorch.SirenNet", records=POINTS, dim_in=4, dim_hidden=8, dim_out=2, num_layers=2),
    plain("neural_ode", local("Dynamics"), False, package="torchdiffeq", records=POINTS),
    plain("neural_ode_adjoint", local("Dynamics"), True, package="torchdiffeq", records=POINTS),
    plain("fourier_operator", "neuralop.models.FNO", records=columns(x=floats(1, 8, 8)), losses=on_x, n_modes=(4, 4),
          in_channels=1, out_channels=1, hidden_channels=8, n_layers=1,
          single=True),
]  # fmt: skip

ROWS: list[Row] = [*TABLES, *CLICK, *FLOWS, *CONTROL, *SCIENCE]
