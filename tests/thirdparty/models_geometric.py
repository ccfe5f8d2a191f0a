"""torch_geometric: packed graphs, one loss per graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.zoo.case import regress

from .row import Row, thing

WIDTH = 8


def graphs(edge_features: int = 0, atoms: bool = False) -> Callable[[int, torch.Generator], list[Any]]:
    """Random connected undirected graphs of 3 to 7 nodes."""

    def draw(number: int, g: torch.Generator) -> list[Any]:
        data = thing("torch_geometric.data.Data")
        found = []
        for _ in range(number):
            nodes = int(torch.randint(3, 8, (1,), generator=g))
            path = torch.stack([torch.arange(nodes - 1), torch.arange(1, nodes)])
            extra = torch.randint(0, nodes, (2, 2), generator=g)
            one_way = torch.cat([path, extra], 1)
            edges = torch.cat([one_way, one_way.flip(0)], 1)
            graph = data(edge_index=edges, num_nodes=nodes, x=torch.randn(nodes, WIDTH, generator=g).double())
            if edge_features:
                graph.edge_attr = torch.rand(edges.shape[1], edge_features, generator=g).double()
            if atoms:
                graph.z = torch.randint(1, 9, (nodes,), generator=g)
                graph.pos = torch.randn(nodes, 3, generator=g).double()
            found.append(graph)
        return found

    return draw


def pack(graphs: list[Any]) -> Any:
    return thing("torch_geometric.data.Batch").from_data_list(graphs)


class Network(nn.Module):
    """Two layers of the package, its pooling, a linear head."""

    def __init__(
        self, first: nn.Module, second: nn.Module, width: int, pool: str, norm: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.first, self.second, self.norm = first, second, norm
        self.pool = thing(f"torch_geometric.nn.{pool}")
        if isinstance(self.pool, type):
            self.pool = self.pool()
        self.head = nn.Linear(width, 2)


def by_graph(*names: str, norm_takes_batch: bool = True) -> Callable[[nn.Module, Any], Tensor]:
    """A loss of `Network` whose layers take the node features, the edges and further attributes of the batch."""

    def losses(model: Any, batch: Any) -> Tensor:
        further = {name: getattr(batch, name) for name in names}
        h = model.first(batch.x, batch.edge_index, **further)
        if model.norm is not None:
            h = model.norm(h, batch.batch) if norm_takes_batch else model.norm(h)
        h = model.second(h.relu(), batch.edge_index, **further)
        return regress(model.head(model.pool(h.tanh(), batch.batch)))

    return losses


def conv(
    name: str,
    layer: str,
    *,
    pool: str = "global_mean_pool",
    names: tuple[str, ...] = (),
    inner: bool = False,
    heads: int = 1,
    norm: tuple[str, bool] | None = None,
    records: Any = None,
    args: tuple[Any, ...] | None = None,
    mixes: str = "",
    **options: Any,
) -> Row:
    """A row of two layers of one kind; `inner` is for layers that take a network of the user's."""

    def build() -> nn.Module:
        cls = thing(f"torch_geometric.nn.{layer}")

        def one() -> nn.Module:
            if inner:
                return cls(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)), **options)
            return cls(*(args if args is not None else (WIDTH, WIDTH // heads)), **options)

        normed = None if norm is None else thing(f"torch_geometric.nn.{norm[0]}")
        made = None if normed is None else normed() if norm and norm[0] == "PairNorm" else normed(WIDTH)
        return Network(one(), one(), WIDTH, pool, made).eval()

    drawn = records or graphs(4 if "edge_attr" in names else 0)
    losses = by_graph(*names, norm_takes_batch=norm is None or norm[1])
    return Row(name, "torch_geometric", build, drawn, losses, collate=pack, mixes=mixes)


def model_row(name: str, path: str, losses: Any, records: Any, *args: Any, mixes: str = "", **options: Any) -> Row:
    return Row(
        name,
        "torch_geometric",
        lambda: thing(path)(*args, **options).eval(),
        records,
        losses,
        collate=pack,
        mixes=mixes,
    )


def pooled(model: nn.Module, batch: Any) -> Tensor:
    """One loss per graph from the outputs of its nodes."""
    add = thing("torch_geometric.nn.global_add_pool")
    return regress(add(model(batch.x, batch.edge_index), batch.batch))


def pooled_by_batch(model: nn.Module, batch: Any) -> Tensor:
    add = thing("torch_geometric.nn.global_add_pool")
    return regress(add(model(batch.x, batch.edge_index, batch=batch.batch), batch.batch))


def in_batch(model: nn.Module, batch: Any) -> Tensor:
    add = thing("torch_geometric.nn.global_add_pool")
    return regress(add(model(batch.x, batch.edge_index, batch.batch), batch.batch))


def fingerprint(model: nn.Module, batch: Any) -> Tensor:
    return regress(model(batch.x, batch.edge_index, batch.edge_attr, batch.batch))


def neighbours(pos: Tensor, batch: Tensor) -> tuple[Tensor, Tensor]:
    """All pairs of atoms of a molecule, in place of a compiled radius search."""
    same = (batch[:, None] == batch[None]) & ~torch.eye(len(batch), dtype=torch.bool)
    edges = same.nonzero().T
    return edges, (pos[edges[0]] - pos[edges[1]]).norm(dim=-1)


def energy(model: nn.Module, batch: Any) -> Tensor:
    return regress(model(batch.z, batch.pos, batch.batch))


ATOMS = graphs(atoms=True)

ROWS: list[Row] = [
    conv("gcn", "GCNConv"),
    conv("gcn_max_pool", "GCNConv", pool="global_max_pool"),
    conv("gat", "GATConv"),
    conv("gatv2_edges", "GATv2Conv", names=("edge_attr",), edge_dim=4, pool="global_add_pool"),
    conv("gin", "GINConv", inner=True, train_eps=True, pool="global_add_pool"),
    conv("gine", "GINEConv", inner=True, edge_dim=4, names=("edge_attr",)),
    conv("sage", "SAGEConv"),
    conv("sage_max", "SAGEConv", aggr="max"),
    conv("graph_conv", "GraphConv"),
    conv("cheb", "ChebConv", args=(WIDTH, WIDTH, 3)),
    conv("tag", "TAGConv"),
    conv("arma", "ARMAConv"),
    conv("transformer_conv", "TransformerConv", names=("edge_attr",), edge_dim=4),
    conv("res_gated", "ResGatedGraphConv"),
    conv("gmm", "GMMConv", args=(WIDTH, WIDTH, 4, 2), names=("edge_attr",)),
    conv("feast", "FeaStConv"),
    conv("gen", "GENConv"),
    conv("gated_graph", "GatedGraphConv", args=(WIDTH, 2)),
    conv("general", "GeneralConv"),
    conv("film", "FiLMConv"),
    conv("gcn_graph_norm", "GCNConv", norm=("GraphNorm", True)),
    conv("gcn_layer_norm_by_graph", "GCNConv", norm=("LayerNorm", True)),
    conv(
        "gin_layer_norm_over_all", "GINConv", inner=True, norm=("LayerNorm", False),
        mixes="LayerNorm in graph mode without the batch vector: statistics of all nodes",
    ),
    conv("gin_pair_norm_by_graph", "GINConv", inner=True, norm=("PairNorm", True)),
    conv(
        "gin_pair_norm_over_all", "GINConv", inner=True, norm=("PairNorm", False),
        mixes="PairNorm without the batch vector: statistics of all nodes",
    ),
    conv("gat_two_heads_add_pool", "GATConv", args=(WIDTH, WIDTH // 2, 2), pool="global_add_pool"),
    model_row("basic_gcn_model", "torch_geometric.nn.GCN", pooled, graphs(), WIDTH, 12, 3, 2),
    model_row("basic_gin_model", "torch_geometric.nn.GIN", pooled, graphs(), WIDTH, 12, 2, 2),
    model_row(
        "basic_gcn_norm_by_graph", "torch_geometric.nn.GCN", pooled_by_batch, graphs(), WIDTH, 12, 2, 2,
        norm="graph_norm",
    ),
    model_row(
        "basic_gin_norm_over_all", "torch_geometric.nn.GIN", pooled_by_batch, graphs(), WIDTH, 12, 2, 2,
        norm="graph_norm", mixes="the MLPs inside GIN get no batch vector: GraphNorm over all nodes",
    ),
    model_row("basic_gat_model", "torch_geometric.nn.GAT", pooled, graphs(), WIDTH, 12, 2, 2, heads=2),
    model_row("basic_sage_jumping", "torch_geometric.nn.GraphSAGE", pooled, graphs(), WIDTH, 12, 2, 2, jk="cat"),
    model_row("attentive_fp", "torch_geometric.nn.AttentiveFP", fingerprint, graphs(4), WIDTH, 12, 2, 4, 2, 2),
    model_row("deep_gcn_graph_unet", "torch_geometric.nn.GraphUNet", in_batch, graphs(), WIDTH, 12, 2, 2),
    model_row("basic_edge_cnn_model", "torch_geometric.nn.EdgeCNN", pooled, graphs(), WIDTH, 12, 2, 2, norm=None),
    model_row(
        "schnet", "torch_geometric.nn.SchNet", energy, ATOMS, hidden_channels=12, num_filters=12, num_interactions=2,
        num_gaussians=6, cutoff=4.0, interaction_graph=neighbours,
    ),
]  # fmt: skip
