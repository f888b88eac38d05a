"""Attention over a sequence, against NumPy."""

import numpy
import pytest
from conftest import DIM, HEADS, PAGE, create, filled, rows

import kvfs

GROUP = 2


def queries(count, seed=7):
    return numpy.random.default_rng(seed).standard_normal((count, HEADS * GROUP, DIM), dtype=numpy.float32)


def reference(q, k, v, positions, first=0):
    """Causal softmax attention of tokens from `first` on; with the logarithm of the sums."""
    k, v = (numpy.repeat(x, GROUP, axis=0) for x in (k, v))
    logits = numpy.einsum("qhd,htd->qht", q, k) / numpy.sqrt(DIM)
    tokens = first + numpy.arange(k.shape[1])
    logits = numpy.where(tokens[None, None] <= numpy.asarray(positions)[:, None, None], logits, -numpy.inf)
    weights = numpy.exp(logits - logits.max(axis=-1, keepdims=True))
    lse = numpy.log(weights.sum(axis=-1)) + logits.max(axis=-1)
    output = numpy.einsum("qht,htd->qhd", weights / weights.sum(axis=-1, keepdims=True), v)
    return output, lse


def test_pages_and_tail_are_attended_to(model):
    tokens = 3 * PAGE + 5
    sequence, k, v = filled(model, "chat", tokens)
    q = queries(3)
    positions = [tokens - 3, tokens - 2, tokens - 1]
    partials = kvfs.attend(q, sequence, 1)
    output, lse = reference(q, k[1], v[1], positions)
    numpy.testing.assert_allclose(partials.finish().numpy(), output, rtol=1e-4, atol=1e-5)
    numpy.testing.assert_allclose(partials.lse.numpy(), lse, rtol=1e-4, atol=1e-5)
    halves = kvfs.attend(q.astype(numpy.float16), sequence, 1, positions=positions, threads=1)
    numpy.testing.assert_allclose(halves.finish().numpy(), output, rtol=1e-2, atol=1e-2)


def test_parts_merge_with_an_engines_own(model):
    prefix, tokens = 2 * PAGE, 3 * PAGE
    sequence, k, v = filled(model, "chat", tokens)
    q = queries(1)
    positions = [tokens - 1]
    part = kvfs.attend(q, sequence, 0, positions=positions, end=prefix)
    own = reference(q, k[0, :, prefix:], v[0, :, prefix:], positions, first=prefix)
    expected, _ = reference(q, k[0], v[0], positions)
    merged = part.merge_output(*(x.astype(numpy.float32) for x in own))
    numpy.testing.assert_allclose(merged.finish().numpy(), expected, rtol=1e-4, atol=1e-5)
    nothing = part.merge_output(own[0].astype(numpy.float32), numpy.full((1, HEADS * GROUP), -numpy.inf, numpy.float32))
    numpy.testing.assert_array_equal(nothing.finish().numpy(), part.finish().numpy())
    empty = kvfs.attend(q, sequence, 0, positions=positions, end=0)
    numpy.testing.assert_array_equal(part.merge(empty).o.numpy(), part.o.numpy())


def test_one_query_and_a_window(model):
    sequence, k, v = filled(model, "chat", 3 * PAGE)
    q = queries(1)
    windowed = kvfs.attend(q[0], sequence, 2, window=PAGE)
    expected, _ = reference(q, k[2, :, 2 * PAGE :], v[2, :, 2 * PAGE :], [3 * PAGE - 1], first=2 * PAGE)
    numpy.testing.assert_allclose(windowed.finish().numpy(), expected, rtol=1e-4, atol=1e-5)


def test_what_does_not_fit_is_refused(model):
    sequence, _, _ = filled(model, "chat", PAGE)
    for q, why in (
        (numpy.zeros((1, 3, DIM), numpy.float32), "multiple of 2"),
        (numpy.zeros((1, 4, DIM + 1), numpy.float32), "shape"),
        (numpy.zeros((1, 4, DIM), numpy.int32), "float32"),
        (numpy.zeros((1, 8, DIM), numpy.float32)[:, ::2], "contiguous"),
    ):
        with pytest.raises(kvfs.InvalidArgument, match=why):
            kvfs.attend(q, sequence, 0)
    with pytest.raises(kvfs.InvalidArgument, match="layer 9"):
        kvfs.attend(queries(1), sequence, 9)
    with pytest.raises(kvfs.InvalidArgument, match="sinks"):
        kvfs.attend(queries(1), sequence, 0).finish([0.0])


def test_a_layer_is_attended_to_before_the_others_are_there(model):
    k, v = rows(PAGE)
    sequence = model.create_sequence("chat")
    assert len(sequence) == 0
    sequence.write_page(0, 0, k[0], v[0])
    q = queries(1)
    expected, _ = reference(q, k[0], v[0], [PAGE - 1])
    partials = kvfs.attend(q, sequence, 0, positions=[PAGE - 1], end=PAGE)
    numpy.testing.assert_allclose(partials.finish().numpy(), expected, rtol=1e-4, atol=1e-5)
    assert numpy.all(kvfs.attend(q, sequence, 0, positions=[PAGE - 1]).l.numpy() == 0)


def rotated(q, position):
    """Queries as a model turns them for where they stand, in halves."""
    angles = position * 10000.0 ** (-2 * numpy.arange(DIM // 2) / DIM)
    a, b = q[..., : DIM // 2], q[..., DIM // 2 :]
    turned = (a * numpy.cos(angles) - b * numpy.sin(angles), a * numpy.sin(angles) + b * numpy.cos(angles))
    return numpy.concatenate(turned, axis=-1).astype(numpy.float32)


def test_moved_tokens_are_seen_where_they_stand(mount):
    model = create(mount, "turned", rope={"theta": 10000.0, "pairing": "halves"})
    sequence, _, _ = filled(model, "chat", 3 * PAGE)
    sequence.shift(0, PAGE, "full")
    # Within a window that the dropped tokens are outside of, distances are all that counts.
    results = [
        kvfs.attend(rotated(queries(1), last), of, 0, positions=[last], window=PAGE).finish().numpy()
        for of, last in ((model.sequence("full"), 3 * PAGE - 1), (sequence, 2 * PAGE - 1))
    ]
    numpy.testing.assert_allclose(*results, rtol=1e-3, atol=1e-4)
