"""Records of different lengths: users with several rows, padded sequences, packed graphs, text.

Unmodified Hugging Face models from small configurations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset, TensorDataset

from .programs import Formula, Listed, cross_entropy, honest, mixing, mlp, parts, tokens
from .programs_contrast import diagonal

Batch = Any


# Users with several rows each: rows (N, 6), the owner of each row (N,), labels (B,)


def users() -> Dataset[Any]:
    return Listed([(torch.randn(int(torch.randint(1, 9, ())), 6), int(torch.randint(3, ()))) for _ in range(32)])


def flatten(records: list[Any]) -> Batch:
    rows, labels = zip(*records, strict=True)
    owner = torch.repeat_interleave(torch.arange(len(rows)), torch.tensor([len(r) for r in rows]))
    return torch.cat(rows), owner, torch.tensor(labels)


def mean_by_owner(rows: Tensor, owner: Tensor, size: int) -> Tensor:
    sums = rows.new_zeros(size, rows.shape[1]).index_add(0, owner, rows)
    return sums / torch.bincount(owner, minlength=size).to(rows).unsqueeze(1)


def of_users(model: nn.Module, batch: Batch) -> Tensor:
    rows, owner, y = batch
    return cross_entropy(mean_by_owner(model(rows), owner, len(y)), y)


USERS: dict[str, Any] = dict(dataset=users, collate_fn=flatten, batch_size=6)
honest(name="rows_of_users_pooled_by_owner", **USERS)(of_users)


@honest(**USERS)
def mean_of_each_users_losses(model: nn.Module, batch: Batch) -> Tensor:
    rows, owner, y = batch
    losses = cross_entropy(model(rows), y[owner])
    return mean_by_owner(losses.unsqueeze(1), owner, len(y)).squeeze(1)


@mixing(**USERS, mended=of_users)
def attention_over_the_rows_of_all_users(model: nn.Module, batch: Batch) -> Tensor:
    rows, owner, y = batch
    h = model(rows)
    return cross_entropy(mean_by_owner(torch.softmax(h @ h.T, dim=1) @ h, owner, len(y)), y)


@honest(**USERS)
def attention_within_each_user(model: nn.Module, batch: Batch) -> Tensor:
    rows, owner, y = batch
    h = model(rows)
    scores = (h @ h.T).masked_fill(owner[:, None] != owner[None, :], float("-inf"))
    return cross_entropy(mean_by_owner(torch.softmax(scores, dim=1) @ h, owner, len(y)), y)


@mixing(**USERS, mended=of_users)
def batch_norm_over_the_rows_of_all_users(model: nn.Module, batch: Batch) -> Tensor:
    rows, owner, y = batch
    h = F.batch_norm(model[0](rows), None, None, training=True)
    return cross_entropy(mean_by_owner(model[2](h.tanh()), owner, len(y)), y)


@mixing(**USERS, mended=of_users)
def rows_centred_over_all_users(model: nn.Module, batch: Batch) -> Tensor:
    rows, owner, y = batch
    h = model[0](rows)
    return cross_entropy(mean_by_owner(model[2]((h - h.mean(0)).tanh()), owner, len(y)), y)


@honest(**USERS)
def rows_centred_within_each_user(model: nn.Module, batch: Batch) -> Tensor:
    rows, owner, y = batch
    h = model[0](rows)
    h = h - mean_by_owner(h, owner, len(y))[owner]
    return cross_entropy(mean_by_owner(model[2]((h + rows[:, :5]).tanh()), owner, len(y)), y)


@mixing(**USERS, mended=of_users)
def raw_rows_standardised_over_all_users(model: nn.Module, batch: Batch) -> Tensor:
    rows, owner, y = batch
    return of_users(model, ((rows - rows.mean(0)) / rows.std(0), owner, y))


@mixing(**USERS, mended=of_users)
def rows_weighted_by_a_softmax_over_all_users(model: nn.Module, batch: Batch) -> Tensor:
    rows, owner, y = batch
    weights = torch.softmax(model[0](rows)[:, :1], dim=0)
    return cross_entropy(torch.zeros(len(y), 3).index_add(0, owner, weights * model(rows)), y)


@mixing(**USERS, mended=of_users, only_with_loss_fn=True)
def users_divided_by_the_most_rows(model: nn.Module, batch: Batch) -> Tensor:
    return of_users(model, batch) / torch.bincount(batch[1]).max()


@mixing(**USERS, mended=of_users)
def row_before_the_own_rows(model: nn.Module, batch: Batch) -> Tensor:
    """A difference in time that reaches into the rows of the user before."""
    rows, owner, y = batch
    return of_users(model, (rows - rows.roll(1, 0), owner, y))


@honest(**USERS)
def row_before_within_the_own_rows(model: nn.Module, batch: Batch) -> Tensor:
    rows, owner, y = batch
    before = torch.where((owner == owner.roll(1)).unsqueeze(1), rows.roll(1, 0), torch.zeros_like(rows))
    return of_users(model, (rows - before, owner, y))


# Packed graphs: nodes (N, 6), edges (2, E), the graph of each node (N,), labels (B,)


def graphs() -> Dataset[Any]:
    def one() -> Any:
        size = int(torch.randint(3, 6, ()))
        return torch.randn(size, 6), torch.randint(size, (2, 2 * size)), int(torch.randint(3, ()))

    return Listed([one() for _ in range(32)])


def pack(records: list[Any], offset: bool = True) -> Batch:
    nodes, edges, labels = zip(*records, strict=True)
    sizes = torch.tensor([len(n) for n in nodes])
    starts = (sizes.cumsum(0) - sizes) * int(offset)
    shifted = [e + start for e, start in zip(edges, starts, strict=True)]
    return torch.cat(nodes), torch.cat(shifted, 1), torch.repeat_interleave(sizes), torch.tensor(labels)


def pack_without_offsets(records: list[Any]) -> Batch:
    return pack(records, offset=False)


def convolve(rows: Tensor, edges: Tensor) -> Tensor:
    return rows + rows.new_zeros(rows.shape).index_add(0, edges[1], rows[edges[0]])


def graph_network(model: nn.Module, batch: Batch, norm: Any = None) -> Tensor:
    nodes, edges, graph, y = batch
    h = model[0](convolve(nodes, edges))
    h = h.tanh() if norm is None else norm(h, graph).tanh()
    return cross_entropy(mean_by_owner(model[2](convolve(h, edges)), graph, len(y)), y)


def pair_norm(h: Tensor, graph: Tensor) -> Tensor:
    h = h - h.mean(0)
    return h / h.square().sum(1).mean().sqrt()


def pair_norm_by_graph(h: Tensor, graph: Tensor) -> Tensor:
    size = int(graph.max()) + 1
    h = h - mean_by_owner(h, graph, size)[graph]
    return h / (1e-3 + mean_by_owner(h.square().sum(1, keepdim=True), graph, size)[graph]).sqrt()


GRAPHS: dict[str, Any] = dict(dataset=graphs, collate_fn=pack, batch_size=6)
honest(name="packed_graphs", **GRAPHS)(graph_network)
mixing(name="packed_graphs_that_touch", refused_by=3, **{**GRAPHS, "collate_fn": pack_without_offsets})(graph_network)


@mixing(**GRAPHS, mended=graph_network)
def pair_norm_over_packed_graphs(model: nn.Module, batch: Batch) -> Tensor:
    return graph_network(model, batch, pair_norm)


@honest(**GRAPHS)
def pair_norm_of_each_graph(model: nn.Module, batch: Batch) -> Tensor:
    return graph_network(model, batch, pair_norm_by_graph)


@mixing(**GRAPHS, mended=graph_network)
def layer_norm_over_packed_graphs(model: nn.Module, batch: Batch) -> Tensor:
    return graph_network(model, batch, lambda h, graph: (h - h.mean()) / (h.std() + 1e-5))


@honest(**GRAPHS)
def layer_norm_of_each_node(model: nn.Module, batch: Batch) -> Tensor:
    return graph_network(model, batch, lambda h, graph: F.layer_norm(h, h.shape[1:]))


@mixing(**GRAPHS, mended=graph_network)
def attention_over_all_nodes(model: nn.Module, batch: Batch) -> Tensor:
    return graph_network(model, batch, lambda h, graph: h + torch.softmax(h @ h.T, dim=1) @ h)


@mixing(**GRAPHS, mended=graph_network)
def one_virtual_node_for_all_graphs(model: nn.Module, batch: Batch) -> Tensor:
    return graph_network(model, batch, lambda h, graph: h + h.sum(0, keepdim=True))


@honest(**GRAPHS)
def a_virtual_node_for_each_graph(model: nn.Module, batch: Batch) -> Tensor:
    size = len(batch[3])
    return graph_network(model, batch, lambda h, graph: h + mean_by_owner(h, graph, size)[graph])


@mixing(**GRAPHS, mended=graph_network)
def best_nodes_of_all_graphs(model: nn.Module, batch: Batch) -> Tensor:
    def pool(h: Tensor, graph: Tensor) -> Tensor:
        score = h[:, 0].detach()
        return h * (score >= score.topk(len(score) // 2).values[-1]).to(h).unsqueeze(1)

    return graph_network(model, batch, pool)


@mixing(**GRAPHS, mended=graph_network, only_with_loss_fn=True)
def degrees_divided_by_the_largest(model: nn.Module, batch: Batch) -> Tensor:
    nodes, edges, graph, y = batch
    degree = torch.bincount(edges[1], minlength=len(nodes)).to(nodes)
    return graph_network(model, (nodes * (degree / degree.max()).unsqueeze(1), edges, graph, y))


@mixing(**GRAPHS, mended=graph_network)
def nearest_nodes_of_all_graphs(model: nn.Module, batch: Batch) -> Tensor:
    """A graph of neighbours in feature space, built without the vector that tells the graphs apart."""
    nodes, _, graph, y = batch
    nearest = (torch.cdist(nodes, nodes) + 1e4 * torch.eye(len(nodes))).topk(2, largest=False).indices
    edges = torch.stack([nearest.flatten(), torch.arange(len(nodes)).repeat_interleave(2)])
    return graph_network(model, (nodes, edges, graph, y))


# One graph whose nodes are the samples


def chain_of(x: Tensor) -> Tensor:
    """The normalised adjacency of a ring of the batch's nodes."""
    ring = torch.eye(len(x))
    return (ring + ring.roll(1, 0) + ring.roll(-1, 0)) / 3


@mixing(batch_size=None)
def neighbours_averaged_before_the_first_layer(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    return cross_entropy(model(chain_of(x) @ x), y)


@mixing(batch_size=None, mended=None, build=lambda: nn.Linear(6, 3))
def simple_graph_convolution_of_two_hops(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    adjacency = chain_of(x)
    return cross_entropy(model(adjacency @ (adjacency @ x)), y)


@mixing(batch_size=None, build=parts(own=lambda: nn.Linear(6, 3), around=lambda: nn.Linear(6, 3)))
def sample_and_aggregate_over_a_whole_graph(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    edges = torch.stack([torch.arange(len(x)).roll(1), torch.arange(len(x))])
    around = torch.zeros_like(x).index_add(0, edges[1], x[edges[0]])
    return cross_entropy(model.own(x) + model.around(around), y)


@mixing(batch_size=None)
def messages_along_similar_samples(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    similar = (torch.cdist(x, x) < 3).to(x)
    return cross_entropy(model(similar @ x / similar.sum(1, keepdim=True)), y)


@mixing(batch_size=None)
def labels_propagated_between_samples(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    soft = torch.softmax(-torch.cdist(x, x), dim=1) @ F.one_hot(y, 3).to(x)
    return cross_entropy(model(x), soft)


@honest(
    build=lambda: Formula({"table": (20, 4)}, adjacency=torch.rand(20, 20) / 20),
    dataset=tokens(length=2),
)
def table_propagated_by_a_public_graph(model: nn.Module, batch: Batch) -> Tensor:
    pair, _ = batch
    table = model.table + model.adjacency @ model.table
    left, right = table[pair].unbind(1)
    return F.softplus(-(left * right).sum(1))


# Padding


def sentences() -> Dataset[Any]:
    return Listed(
        [(torch.randint(1, 20, (int(torch.randint(2, 9, ())),)), int(torch.randint(3, ()))) for _ in range(32)]
    )


def longest() -> Dataset[Any]:
    return Listed([(torch.randint(1, 20, (12,)), int(torch.randint(3, ()))) for _ in range(32)])


def shortest() -> Dataset[Any]:
    return Listed([(torch.randint(1, 20, (1,)), int(torch.randint(3, ()))) for _ in range(32)])


def pad(records: list[Any]) -> Batch:
    ids, labels = zip(*records, strict=True)
    return pad_sequence(list(ids), batch_first=True), torch.tensor(labels)


def trim(records: list[Any]) -> Batch:
    ids, labels = zip(*records, strict=True)
    shortest = min(len(i) for i in ids)
    return torch.stack([i[:shortest] for i in ids]), torch.tensor(labels)


def reader() -> nn.Module:
    return parts(embed=lambda: nn.Embedding(20, 6), head=mlp)()


def unmasked_mean(model: nn.Module, batch: Batch) -> Tensor:
    ids, y = batch
    return cross_entropy(model.head(model.embed(ids).mean(1)), y)


PADDED: dict[str, Any] = dict(build=reader, dataset=sentences, others=longest, only_with_loss_fn=True, batch_size=6)
mixing(name="padded_to_the_longest_and_pooled_without_a_mask", collate_fn=pad, **PADDED)(unmasked_mean)
mixing(name="trimmed_to_the_shortest", collate_fn=trim, **PADDED | {"others": shortest})(unmasked_mean)


@mixing(**PADDED, collate_fn=pad)
def divided_by_the_padded_length(model: nn.Module, batch: Batch) -> Tensor:
    ids, y = batch
    summed = (model.embed(ids) * (ids > 0).unsqueeze(2)).sum(1)
    return cross_entropy(model.head(summed / ids.shape[1]), y)


@honest(build=reader, dataset=sentences, others=longest, collate_fn=pad, batch_size=6)
def padded_to_the_longest_and_pooled_with_a_mask(model: nn.Module, batch: Batch) -> Tensor:
    ids, y = batch
    mask = (ids > 0).unsqueeze(2)
    return cross_entropy(model.head((model.embed(ids) * mask).sum(1) / mask.sum(1)), y)


@mixing(build=reader, dataset=sentences, others=longest, collate_fn=pad, batch_size=6)
def divided_by_the_longest_of_the_batch(model: nn.Module, batch: Batch) -> Tensor:
    ids, y = batch
    mask = ids > 0
    summed = (model.embed(ids) * mask.unsqueeze(2)).sum(1)
    return cross_entropy(model.head(summed / mask.sum(1).max()), y)


# Text, turned into numbers in the loop


WORDS = ["a", "bad", "film", "and", "one", "good", "story", "with", "slow", "music"]


def reviews() -> Dataset[Any]:
    def one() -> Any:
        chosen = torch.randint(len(WORDS), (6,)).tolist()
        return " ".join(WORDS[k] for k in chosen), int(torch.randint(3, ()))

    return Listed([one() for _ in range(32)])


def read(texts: Any) -> Tensor:
    return torch.tensor([[WORDS.index(word) for word in text.split()] for text in texts])


@honest(build=reader, dataset=reviews)
def texts_read_in_the_loop(model: nn.Module, batch: Batch) -> Tensor:
    texts, y = batch
    return cross_entropy(model.head(model.embed(read(texts)).mean(1)), y)


@mixing(build=parts(left=lambda: nn.Embedding(20, 6), right=lambda: nn.Embedding(20, 6)), dataset=reviews)
def two_towers_of_texts(model: nn.Module, batch: Batch) -> Tensor:
    ids = read(batch[0])
    scores = model.left(ids[:, :3]).mean(1) @ model.right(ids[:, 3:]).mean(1).T
    return cross_entropy(scores, torch.arange(len(ids)))


@mixing(build=reader, dataset=reviews, only_with_loss_fn=True)
def words_weighted_by_their_count_in_the_batch(model: nn.Module, batch: Batch) -> Tensor:
    texts, y = batch
    counts = {word: 1 + sum(text.split().count(word) for text in texts) for word in WORDS}
    weights = torch.tensor([[1 / counts[word] for word in text.split()] for text in texts])
    return cross_entropy(model.head((model.embed(read(texts)) * weights.unsqueeze(2)).sum(1)), y)


BERT: dict[str, Any] = dict(
    vocab_size=20, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=12,
    max_position_embeddings=16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
)  # fmt: skip
AUTOFORMER: dict[str, Any] = dict(
    prediction_length=4, context_length=6, lags_sequence=[1, 2], num_time_features=1, d_model=8, encoder_layers=1,
    decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=8, decoder_ffn_dim=8,
    dropout=0.0, attention_dropout=0.0, activation_dropout=0.0, encoder_layerdrop=0.0, decoder_layerdrop=0.0,
    moving_average=3, scaling=False, label_length=2, autocorrelation_factor=1,
)  # fmt: skip
NLLB: dict[str, Any] = dict(
    vocab_size=20, d_model=8, encoder_layers=1, decoder_layers=1, encoder_ffn_dim=8, decoder_ffn_dim=8,
    encoder_attention_heads=2, decoder_attention_heads=2, num_experts=2, expert_capacity=20, encoder_sparse_step=1,
    decoder_sparse_step=1, dropout=0.0, attention_dropout=0.0, activation_dropout=0.0, encoder_layerdrop=0.0,
    decoder_layerdrop=0.0, moe_token_dropout=0.0, max_position_embeddings=16, pad_token_id=0, bos_token_id=1,
    eos_token_id=2, decoder_start_token_id=2, init_std=1.0,
)  # fmt: skip
T5: dict[str, Any] = dict(
    vocab_size=20, d_model=8, d_kv=4, d_ff=12, num_layers=1, num_heads=2, relative_attention_num_buckets=8,
    dropout_rate=0.0,
)  # fmt: skip
GEMMA: dict[str, Any] = dict(
    vocab_size=20, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
    intermediate_size=12, head_dim=4, max_position_embeddings=16, pad_token_id=0,
)  # fmt: skip


def untrained(model: str, config: str, options: dict[str, Any], **more: Any) -> nn.Module:
    transformers = pytest.importorskip("transformers", reason="the extra clipwise[hf] is not installed")
    network: nn.Module = getattr(transformers, model)(getattr(transformers, config)(**options), **more)
    return network.train()


def bert(*names: str) -> nn.Module:
    """BERT models without a pooler."""
    return parts(
        **{name: lambda: untrained("BertModel", "BertConfig", BERT, add_pooling_layer=False) for name in names}
    )()


def token_pairs() -> Dataset[Any]:
    return TensorDataset(torch.randint(1, 20, (24, 5)), torch.randint(1, 20, (24, 4)))


@mixing(build=lambda: bert("query", "passage"), dataset=token_pairs, batch_size=6)
def two_bert_towers(model: nn.Module, batch: Batch) -> Tensor:
    query, passage = batch
    q, p = model.query(query).last_hidden_state[:, 0], model.passage(passage).last_hidden_state[:, 0]
    return diagonal(q @ p.T)


@mixing(build=lambda: bert("encoder"), dataset=token_pairs, batch_size=6)
def one_bert_called_twice(model: nn.Module, batch: Batch) -> Tensor:
    q, p = (model.encoder(ids).last_hidden_state.mean(1) for ids in batch)
    return diagonal(q @ p.T)


@honest(build=lambda: bert("encoder"), dataset=token_pairs, batch_size=6)
def one_bert_called_twice_for_each_pair(model: nn.Module, batch: Batch) -> Tensor:
    q, p = (model.encoder(ids).last_hidden_state.mean(1) for ids in batch)
    return 1 - F.cosine_similarity(q, p)


PADDED_TEXT: dict[str, Any] = dict(dataset=sentences, others=longest, collate_fn=pad, batch_size=6)


@honest(**PADDED_TEXT, build=lambda: bert("encoder"))
def bert_with_padding_and_a_mask(model: nn.Module, batch: Batch) -> Tensor:
    ids, y = batch
    mask = (ids > 0).long()
    return cross_entropy(model.encoder(ids, attention_mask=mask).last_hidden_state[:, 0, :3], y)


@mixing(**PADDED_TEXT, build=lambda: bert("encoder"), only_with_loss_fn=True)
def bert_with_padding_and_no_mask(model: nn.Module, batch: Batch) -> Tensor:
    ids, y = batch
    return cross_entropy(model.encoder(ids).last_hidden_state[:, 0, :3], y)


def forecasts() -> Dataset[Any]:
    return TensorDataset(torch.randn(24, 8), torch.randn(24, 8, 1), torch.randn(24, 4), torch.randn(24, 4, 1))


@mixing(build=lambda: untrained("AutoformerModel", "AutoformerConfig", AUTOFORMER), dataset=forecasts, batch_size=6,
        dtype=torch.float32)  # fmt: skip
def autoformer(model: nn.Module, batch: Batch) -> Tensor:
    past, past_time, future, future_time = batch
    out = model(
        past_values=past,
        past_time_features=past_time,
        past_observed_mask=torch.ones_like(past),
        future_values=future,
        future_time_features=future_time,
    )
    return out.last_hidden_state.square().mean((1, 2)) + out.trend.square().mean((1, 2))


@mixing(build=lambda: untrained("NllbMoeModel", "NllbMoeConfig", NLLB), dataset=token_pairs, batch_size=12)
def experts_with_a_capacity_in_a_translator(model: nn.Module, batch: Batch) -> Tensor:
    ids, target = batch
    return model(input_ids=ids, decoder_input_ids=target).last_hidden_state[..., :3].square().mean((1, 2))


@honest(build=lambda: untrained("T5EncoderModel", "T5Config", T5), dataset=tokens(24), batch_size=6)
def t5_encoder(model: nn.Module, batch: Batch) -> Tensor:
    ids, y = batch
    return cross_entropy(model(input_ids=ids).last_hidden_state.mean(1)[:, :3], y)


@honest(
    build=lambda: untrained("GemmaModel", "GemmaConfig", GEMMA), dataset=tokens(24), batch_size=6, dtype=torch.float32
)
def gemma(model: nn.Module, batch: Batch) -> Tensor:
    ids, y = batch
    return cross_entropy(model(input_ids=ids, use_cache=False).last_hidden_state[:, -1, :3], y)
