"""What holds for every policy of sparse training, and the rule of each."""

import math
from itertools import pairwise, product

import pytest
import torch

from pipeback.sparsities.base import At
from pipeback.sparsities.densities import erk
from tests.sparsities.policies import DTYPES, OPTIONS, SHAPES, best, places, policy

AT = At(seed=3, stage=1)


def tensors(dtype=torch.float32, seed=0, shapes=SHAPES):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def start(rule, weights, at=AT):
    densities = rule.densities([w.shape for w in weights])
    return densities, rule.masks(weights, densities, at)


def numbers(tensor):
    return [abs(x) for x in tensor.double().flatten().tolist()]


# -- what holds for every policy ---------------------------------------------------------------------------------------

VARIANTS = [
    ("magnitude", {}), ("magnitude", {"distribution": "erk"}), ("gradual", {}), ("gradual", {"initial": 0.5}),
    ("set", {}), ("set", {"by_sign": True, "initial": "magnitude", "distribution": "uniform"}), ("rigl", {}),
    ("rigl", {"initial": "magnitude", "keep_first": True}),
]  # fmt: skip
variants = pytest.mark.parametrize(("name", "options"), VARIANTS, ids=[f"{n}-{'-'.join(o)}" for n, o in VARIANTS])


def run(name, options, dtype, at=AT, device="cpu"):
    """All masks over some updates, on weights and gradients that are other ones each time."""

    def values(seed=0):
        return [t.to(device) for t in tensors(dtype, seed)]

    rule = policy(name, **{"density": 0.2, **({"every": 10} if name in ("set", "rigl") else {}), **options})
    densities, masks = start(rule, values(), at)
    found = [masks]
    for update in range(1, 61):
        if rule.due(update):
            weights = [w * m for w, m in zip(values(update), masks)]
            gradients = values(-update) if rule.dense_gradient(update) else [None] * len(weights)
            before = [t.clone() for t in (*weights, *masks)]
            fresh = rule.change(weights, masks, gradients, densities, at._replace(update=update))
            assert all(torch.equal(a, b) for a, b in zip(before, (*weights, *masks)))  # pure
            masks = fresh
            found.append(masks)
        else:
            assert not rule.dense_gradient(update)
    return rule, densities, found


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@variants
def test_exact_numbers_of_survivors(name, options, dtype):
    _, densities, found = run(name, options, dtype)
    assert (len(found) > 1) == (name != "magnitude")
    for masks in found:
        assert all(m.dtype == torch.bool and m.shape == shape for m, shape in zip(masks, SHAPES))
    counts = [[int(m.sum()) for m in masks] for masks in found]
    final = [max(1, round(d * math.prod(shape))) for d, shape in zip(densities, SHAPES)]
    assert counts[-1] == final
    if name == "gradual":
        first = max(options.get("initial", 1.0), 0.2)
        assert counts[0] == [round(first * math.prod(shape)) for shape in SHAPES]
        assert all(a >= b for before, after in pairwise(counts) for a, b in zip(before, after))
    else:
        assert all(each == final for each in counts)
    kept = sum(math.prod(shape) for shape in SHAPES[options.get("keep_first", False) :])
    assert sum(counts[-1][options.get("keep_first", False) :]) == pytest.approx(0.2 * kept, abs=len(SHAPES) / 2)


@variants
def test_the_same_numbers_give_the_same_masks(name, options):
    """Whatever the process drew before, and in whatever pieces a stage is done."""
    torch.manual_seed(1)
    rule, densities, found = run(name, options, torch.float32)
    torch.manual_seed(2)
    for a, b in zip(found, run(name, options, torch.float32)[2]):
        assert all(map(torch.equal, a, b))
    weights = tensors()
    pieces = [rule.masks([w], [d], AT._replace(first=n))[0] for n, (w, d) in enumerate(zip(weights, densities))]
    assert all(map(torch.equal, pieces, found[0]))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_makes_the_same_masks():
    """bfloat16 has many equal magnitudes, so that position decides often."""
    for (name, options), dtype in product(VARIANTS, DTYPES):
        for a, b in zip(run(name, options, dtype)[2], run(name, options, dtype, device="cuda")[2]):
            assert all(n.is_cuda and torch.equal(m, n.cpu()) for m, n in zip(a, b)), (name, options, dtype)


@pytest.mark.parametrize("name", ["set", "rigl"])
def test_random_streams_differ(name):
    """By seed, stage, tensor and update."""
    rule = policy(name, density=0.5, distribution="uniform")
    alike = [torch.ones(30, 30)] * 2
    streams = [At(0, 0), At(1, 0), At(0, 1), At(0, 0, 1)]
    found = [mask for at in streams for mask in rule.masks(alike, [0.5, 0.5], at)]
    assert len({tuple(mask.flatten().tolist()) for mask in found}) == 8
    assert torch.equal(found[1], rule.masks(alike, [0.5, 0.5], At(0, 0, first=1))[0])


@pytest.mark.parametrize("name", OPTIONS)
def test_one_survivor_at_least(name):
    weights = tensors(shapes=[(3, 2), (1, 1)])
    rule = policy(name, density=0.001, **({"every": 1} if name != "magnitude" else {}))
    densities, masks = start(rule, weights)
    for update in range(1, 6):
        masks = rule.change(weights, masks, weights, densities, AT._replace(update=update))
    assert [int(m.sum()) for m in masks] == [1, 1]


def test_nan_is_an_error_that_names_the_tensor():
    weights = tensors()
    weights[3][2, 2] = math.nan
    rule = policy("magnitude")
    with pytest.raises(ValueError, match="the weight of tensor 3 of stage 1, update 0 is NaN.*lower the learning rate"):
        start(rule, weights)
    rule, at = policy("rigl"), AT._replace(update=100, first=2)
    densities, masks = start(rule, tensors())
    masks[3][2, 2] = True
    with pytest.raises(ValueError, match="the weight of tensor 5 of stage 1, update 100 is NaN"):
        rule.change(weights, masks, tensors(seed=1), densities, at)
    masks[3][2, 2] = False  # what stands there is not read
    rule.change(weights, masks, tensors(seed=1), densities, at)
    with pytest.raises(ValueError, match="the gradient of tensor 5 .* is NaN"):
        rule.change(tensors(), masks, weights, densities, at)
    with pytest.raises(ValueError, match="the gradient of tensor 2 .* is missing; this policy needs it dense"):
        rule.change(tensors(), masks, [None] * 5, densities, at)
    with pytest.raises(ValueError, match=r"the gradient of tensor 2 .* has shape \(4,\), its mask \(16, 3, 3, 3\)"):
        rule.change(tensors(), masks, [torch.ones(4)] * 5, densities, at)


# -- each rule ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_magnitude(dtype):
    rule, weights = policy("magnitude", density=0.13), tensors(dtype)
    densities, masks = start(rule, weights)
    for w, mask in zip(weights, masks):
        assert places(mask) == best(numbers(w), round(0.13 * w.numel()), range(w.numel()))
    assert not any(rule.due(t) or rule.dense_gradient(t) for t in range(1000))
    assert all(map(torch.equal, rule.change(weights, masks, weights, densities, AT._replace(update=1)), masks))


def test_gradual_follows_the_cubic():
    """Zhu & Gupta, eq. 1, for t in {t0, t0 + Δt, ..., t0 + nΔt}."""
    t0, n, dt, s_i, s_f = 20, 4, 5, 0.3, 0.9
    rule = policy("gradual", density=1 - s_f, initial=1 - s_i, start=t0, steps=n, every=dt)
    assert [t for t in range(100) if rule.due(t)] == [20, 25, 30, 35, 40]
    weights = tensors(torch.float64, shapes=[(20, 25), (50, 40)])
    densities, masks = start(rule, weights)
    alive = [best(numbers(w), round((1 - s_i) * w.numel()), range(w.numel())) for w in weights]
    assert [places(m) for m in masks] == alive
    for t in (20, 25, 30, 35, 40):
        weights = [w * m for w, m in zip(tensors(torch.float64, t, [(20, 25), (50, 40)]), masks)]
        masks = rule.change(weights, masks, [None, None], densities, AT._replace(update=t))
        s_t = s_f + (s_i - s_f) * (1 - (t - t0) / (n * dt)) ** 3
        alive = [best(numbers(w), round((1 - s_t) * w.numel()), old) for w, old in zip(weights, alive)]
        assert [places(m) for m in masks] == alive
    assert [len(a) for a in alive] == [50, 200]


def test_gradual_runs_to_the_density_of_each_tensor():
    rule = policy("gradual", density=0.2, distribution="erk", steps=2, every=1)
    weights = tensors()
    densities, masks = start(rule, weights)
    assert all(m.all() for m in masks)
    for update in (1, 2):
        masks = rule.change(weights, masks, weights, densities, AT._replace(update=update))
        for d, w, m in zip(densities, weights, masks):
            left = d + (1 - d) * (1 - update / 2) ** 3
            assert int(m.sum()) == round(left * w.numel())
    assert densities == erk(SHAPES, 0.2)


def drawn(old, kept, new):
    """What a change grew; it drew it among everything that the drop left zero."""
    assert kept <= new and len(new) == len(old)
    return new - kept


@pytest.mark.parametrize("by_sign", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_set(dtype, by_sign):
    """Mocanu et al., algorithm 1: remove the share ζ nearest to zero, add as many at random."""
    rule = policy("set", density=0.3, fraction=0.4, every=7, by_sign=by_sign)
    assert [t for t in range(30) if rule.due(t)] == [7, 14, 21, 28] and not rule.dense_gradient(7)
    weights = tensors(dtype)
    densities, masks = start(rule, weights)
    fresh = rule.change(weights, masks, [None] * 5, densities, AT._replace(update=7))
    for w, mask, new in zip(weights, masks, fresh):
        values, old = w.double().flatten().tolist(), places(mask)
        signs = [{i for i in old if values[i] > 0}, {i for i in old if values[i] < 0}] if by_sign else [old]
        kept = set()
        for group in signs:
            kept |= best(numbers(w), len(group) - round(0.4 * len(group)), group)
        grown = drawn(old, kept, places(new))
        assert len(grown) == len(old) - len(kept)
    assert any(places(new) != places(old) for new, old in zip(fresh, masks))
    again = rule.change(weights, masks, [None] * 5, densities, AT._replace(update=14))
    assert not all(map(torch.equal, fresh, again))  # other random numbers


def test_set_may_draw_what_it_just_dropped():
    """All but the rest of the survivors are zero then; every place is as likely."""
    rule = policy("set", density=0.5, fraction=0.5)
    w, mask = torch.arange(1.0, 9).view(2, 4), torch.tensor([[True, False, True, False], [True, False, True, False]])
    hits = torch.zeros(2, 4)
    for update in range(4000):
        hits += rule.change([w], [mask], [None], [0.5], AT._replace(update=update))[0]
    share = hits.view(-1) / 4000  # of the survivors 1, 3, 5, 7 the last two stay
    assert share[4] == share[6] == 1
    assert (share[[0, 1, 2, 3, 5, 7]] - 2 / 6).abs().max() < 4.5 * math.sqrt(2 / 6 * 4 / 6 / 4000)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rigl(dtype):
    """Evci et al., algorithm 1: grow ArgTopK(|g|) over i ∉ θ \\ I_active."""
    rule = policy("rigl", density=0.25, fraction=0.5, every=10, until=55)
    assert [t for t in range(100) if rule.due(t)] == [10, 20, 30, 40, 50]
    assert [t for t in range(100) if rule.dense_gradient(t)] == [10, 20, 30, 40, 50]
    weights = tensors(dtype)
    densities, masks = start(rule, weights)
    assert densities == erk(SHAPES, 0.25)
    regrown = 0
    for t in (10, 20, 30, 40, 50):
        weights, gradients = tensors(dtype, seed=t), tensors(dtype, seed=-t)
        fresh = rule.change(weights, masks, gradients, densities, AT._replace(update=t))
        for w, g, mask, new in zip(weights, gradients, masks, fresh):
            old = places(mask)
            k = round(0.5 / 2 * (1 + math.cos(t * math.pi / 55)) * len(old))
            kept = best(numbers(w), len(old) - k, old)
            grown = best(numbers(g), k, set(range(w.numel())) - kept)
            assert places(new) == kept | grown
            regrown += len(grown & old)
        masks = fresh
    assert regrown > 0  # just-dropped ones among them


def test_rigl_moves_fewer_and_fewer():
    rule = policy("rigl", until=1000, fraction=0.3)
    assert [rule.moved(t) for t in (0, 500, 1000)] == pytest.approx([0.3, 0.15, 0.0])
    assert [t for t in range(2000) if rule.due(t)] == list(range(100, 1000, 100))  # t < T_end


def test_rigl_by_hand():
    """f(1) = 0.5 of four: 1 and 2 go; of the rest the largest gradients are those of a zero and of the one dropped."""
    rule = policy("rigl", fraction=1.0, until=2, every=1)
    w = torch.tensor([[1.0, 0.0, 3.0], [0.0, 2.0, -4.0]])
    g = torch.tensor([[0.5, -7.0, 9.0], [0.1, 6.0, 9.0]])
    (new,) = rule.change([w], [w != 0], [g], [0.6], At(0, 0, 1))
    assert new.tolist() == [[False, True, True], [False, True, True]]
