"""Written training_steps, drawn by hypothesis, which also shrinks one that fails: simple things come first."""

from __future__ import annotations

from hypothesis import strategies as st

from .written import Written

ONE = [  # of a value with six columns another one
    "{a}.tanh()", "{a}.relu()", "{a} * FACTOR", "{a}.clone()", "{a}.detach()", "{a}.flip(-1)", "{a}.abs().sqrt()",
    "F.softmax({a}, -1)", "F.layer_norm({a}, (6,))", "F.gelu({a})", "{a}.cumsum(-1)", "{a} * self.each", "{a} * 1.0",
    "{a} * self.hparams.share", "self.helped({a})", "helper({a}, 3)", "self.leaky({a})", "self.own({a})",
    "{a}[:, :3].repeat(1, 2)", "{a}.T.contiguous().T", "{a}.view(-1, 6)", "{a}.t().t()", "{a}.double()",
    "{a}.expand(2, -1, -1).sum(0)", "{a}.unsqueeze(0).squeeze(0)", "{a}.masked_fill({a} > 1, 0.5)", "{a}.roll(1, -1)",
    "{a} / {a}.norm(dim=-1, keepdim=True).clamp(min=1e-3)", "{a}.square().exp().log1p()", "{a}.sort(-1).values",
    "sum({a}.unbind(0)).unsqueeze(0).expand_as({a})", "{a}.logsumexp(-1, keepdim=True) - {a}",
    "torch.einsum('bi,bi->bi', {a}, {a})", "{a}.where({a} < 1, torch.zeros_like({a}))",
    "{a}.gather(-1, {a}.argsort(-1))", "{a} * self.hparams['share']", "{a} + self.hparams.get('more', 0.5)",
    "{a} * self.shares[1]", "sum({a} * share for share in self.shares)", "{a} * self.table['b'][0]",
    "{a} * self.table['each']", "{a} * self.table.get('b')[-1]", "self.soft({a})", "{a} * self.each[0]",
    "{a} * self.each.flip(0).T[1]", "{a} + self.each.shape[0]",
]  # fmt: skip
TWO = [
    "{a} + {b}", "{a} - {b}", "{a} * {b}", "torch.maximum({a}, {b})", "torch.where({a} > 0, {a}, {b})",
    "torch.cat([{a}, {b}], -1)[..., :6]", "{a}.lerp({b}, 0.3)", "torch.stack([{a}, {b}]).mean(0)",
    "({a} @ {b}.mT) @ {b}",
]  # fmt: skip
LOSSES = [
    "F.mse_loss({a}, y)", "F.l1_loss({a}, y)", "F.huber_loss({a}, y)", "F.cross_entropy({a}, y.argmax(-1))",
    "F.kl_div({a}.log_softmax(-1), y.softmax(-1), reduction='batchmean')", "({a} - y).square().sum(-1).mean()",
    "self.criterion({a}, y)", "F.smooth_l1_loss({a}, y, reduction='sum') / len(x)",
    "1 - F.cosine_similarity({a}, y).mean()", "F.binary_cross_entropy_with_logits({a}, y.sigmoid())",
    "F.gaussian_nll_loss({a}, y, y.abs() + 1)",
]  # fmt: skip
LATER = [  # what may come between the model and the loss, each some lines
    ("with torch.no_grad():", "    seen = {a}.abs()", "    self.log('seen', seen.mean())"),
    ("if self.training and len(x) > 0:", "    out = out + 0.1 * {a}"),
    ("for k in range(2):", "    out = out * (1 + 0.1 * k)"),
    ("out = out.clone()", "out += 0.5"),
    ("out = out.clone()", "flat = out.reshape(-1)", "flat += 0.25"),
    ("self.log('mean', {a}.mean(), on_step=True, on_epoch=True)",),
    ("self.log_dict({{'first': {a}[0, 0], 'three': 3.0}})",),
]
RETURNS = ["return loss", "return {'loss': loss}", "return {'loss': loss, 'out': out.detach()}"]
CHANGES = [
    "pass", "self.each = self.each + 1", "self.each[0] = 3.0", "self.hparams.share = 0.25",
    "self.hparams['more'] = 2.0", "self.shares[1] = 0.5", "self.shares.append(0.5)", "self.table['b'] = (0.5, 2.0)",
    "self.table['each'] += 1", "self.soft = partial(F.softplus, beta=0.5)", "self.own.power = 3",
    "self.leaky = nn.LeakyReLU(0.3)", "self.criterion = nn.L1Loss()", "self.each = torch.cat([self.each])",
    "global FACTOR; FACTOR = 0.75",
]  # fmt: skip
METHODS = ["pb", "gpipe-4", "cerebras", "pipedream", "spectrain"]


@st.composite
def written(draw: st.DrawFn) -> Written:
    """Any."""
    names = ["x", "y"]
    lines = _computed(draw, names)
    given = draw(st.sampled_from([name for name in names if name != "y"]))
    lines.append(f"out = self.model({given})")
    names = ["out", "y", *names[2:]]
    lines += _computed(draw, names)
    for some in draw(st.lists(st.sampled_from(LATER), max_size=3)):
        value = draw(st.sampled_from(names))
        lines += [line.format(a=value) for line in some]
    judged = draw(st.sampled_from([name for name in names if name != "y"]))
    # the loss must depend on the output
    lines.append(f"loss = {draw(st.sampled_from(LOSSES)).format(a=judged)} + 0.01 * out.mean()")
    lines.append(draw(st.sampled_from(RETURNS)))
    return Written(
        tuple(lines), draw(st.sampled_from(METHODS)), draw(st.sampled_from([1, 2])), draw(st.sampled_from(CHANGES))
    )


def _computed(draw: st.DrawFn, names: list[str]) -> list[str]:
    """Some lines; `names` gets what they set."""
    lines = []
    for form in draw(st.lists(st.sampled_from([*ONE, *TWO]), max_size=4)):
        a, b = (draw(st.sampled_from(names)) for _ in range(2))
        names.append(f"v{len(names)}")
        lines.append(f"{names[-1]} = {form.format(a=a, b=b)}")
    return lines
