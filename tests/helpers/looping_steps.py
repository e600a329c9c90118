"""Training steps of loops in loops, and of many small layers, that overflow.

The loss scale of each is too large, so that the backward pass overflows.
"""

import functools

import jax
from jax import lax
import jax.numpy as jnp
import optax

import optax_lossscale as ols

_OBS_SIZE, _NUM_ACTIONS, _VOCAB_SIZE = 4, 3, 32
LARGE_SCALE = 2.0**40


def _dense(key, *shape):
  return jax.random.normal(key, shape) / shape[-2] ** 0.5


def _norm(x):
  x = x - x.mean(-1, keepdims=True)
  return x * lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5)


def _train_step(tx, loss_fn, params, opt_state, batch):
  loss, grads = ols.value_and_grad(loss_fn, opt_state)(params, batch)
  updates, opt_state = tx.update(grads, opt_state, params)
  return (optax.apply_updates(params, updates), opt_state), loss


def recurrent_ppo(
  members=2,
  envs=8,
  steps=8,
  width=16,
  epochs=2,
  minibatches=2,
  updates=2,
  loss_scale=LARGE_SCALE,
):
  """A recurrent PPO under ``vmap``: scans in scans in scans."""
  inner = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-3))
  tx = ols.with_loss_scaling(inner, loss_scale)

  def init(key):
    keys = jax.random.split(key, 7)
    return {
      "embed": _dense(keys[0], _OBS_SIZE, width),
      "input": _dense(keys[1], width, 3 * width),
      "hidden": _dense(keys[2], width, 3 * width),
      "bias": jnp.zeros(3 * width),
      "actor": (_dense(keys[3], width, width), _dense(keys[4], width, 3)),
      "critic": (_dense(keys[5], width, width), _dense(keys[6], width, 1)),
    }

  def network(params, hidden, observed, resets):
    def cell(hidden, inputs):
      x, reset = inputs
      hidden = jnp.where(reset[:, None], 0, hidden)
      x = jnp.split(x @ params["input"] + params["bias"], 3, axis=-1)
      h = jnp.split(hidden @ params["hidden"], 3, axis=-1)
      forget, update = (jax.nn.sigmoid(x[i] + h[i]) for i in range(2))
      hidden += (1 - update) * (jnp.tanh(x[2] + forget * h[2]) - hidden)
      return hidden, hidden

    x = jax.nn.relu(observed @ params["embed"])
    hidden, x = lax.scan(cell, hidden, (x, resets))
    head = lambda first, second: jax.nn.relu(x @ first) @ second
    return hidden, head(*params["actor"]), head(*params["critic"])[..., 0]

  @ols.autocast
  def loss_fn(params, batch):
    hidden, observed, resets, action, old, _, advantage, target = batch
    _, logits, value = network(params, hidden[0], observed, resets)
    logs = jax.nn.log_softmax(logits)
    log = jnp.take_along_axis(logs, action[..., None], -1)[..., 0]
    ratio = jnp.exp(log - old)
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    clipped = jnp.clip(ratio, 0.8, 1.2)
    actor = -jnp.minimum(ratio * advantage, clipped * advantage).mean()
    entropy = -(jnp.exp(logs) * logs).sum(-1).mean()
    return actor + ((value - target) ** 2).mean() - 0.01 * entropy

  def act(params, carry, _):
    state, hidden, done, key = carry
    key, for_action, for_noise = jax.random.split(key, 3)
    hidden, logits, value = network(params, hidden, state[None], done[None])
    action = jax.random.categorical(for_action, logits[0])
    logs = jax.nn.log_softmax(logits[0])
    log = jnp.take_along_axis(logs, action[:, None], -1)[:, 0]
    noise = jax.random.normal(for_noise, state.shape)
    new = 0.9 * state + 0.1 * noise + 0.01 * action[:, None]
    new_done = jnp.abs(new).max(-1) > 2
    new, reward = jnp.where(new_done[:, None], 0, new), -jnp.abs(new).sum(-1)
    transition = state, done, action, log, value[0], reward
    return (new, hidden, new_done, key), transition

  def advantage(carry, inputs):
    total, next_value, next_done = carry
    done, value, reward = inputs
    error = reward + 0.99 * next_value * (1 - next_done) - value
    total = error + 0.94 * (1 - next_done) * total
    return (total, value, done.astype(jnp.float32)), total

  def epoch(batch, carry, _):
    trained, key = carry
    key, shuffle = jax.random.split(key)
    order = jax.random.permutation(shuffle, envs)

    def split_minibatches(x):
      x = x[:, order].reshape(x.shape[0], minibatches, -1, *x.shape[2:])
      return jnp.swapaxes(x, 0, 1)

    minibatch = lambda carry, batch: _train_step(tx, loss_fn, *carry, batch)
    trained, losses = lax.scan(
      minibatch, trained, jax.tree.map(split_minibatches, batch)
    )
    return (trained, key), losses

  def update(carry, _):
    (params, opt_state), state, hidden, done, key = carry
    seen = state, hidden, done, key
    start = hidden
    act_fn = functools.partial(act, params)
    (state, hidden, done, key), seen = lax.scan(act_fn, seen, None, steps)
    observed, dones, action, log, value, reward = seen
    _, _, last = network(params, hidden, state[None], done[None])
    ends = jnp.zeros(envs), last[0], done.astype(jnp.float32)
    rows = dones, value, reward
    _, advantages = lax.scan(advantage, ends, rows, reverse=True)
    targets = value, advantages, advantages + value
    batch = start[None], observed, dones, action, log, *targets
    start = (params, opt_state), key
    run_epoch = functools.partial(epoch, batch)
    (trained, key), losses = lax.scan(run_epoch, start, None, epochs)
    return (trained, state, hidden, done, key), losses

  def train(params, opt_state, key):
    state = jnp.full((envs, _OBS_SIZE), 0.3)
    hidden, done = jnp.zeros((envs, width)), jnp.zeros(envs, bool)
    carry = (params, opt_state), state, hidden, done, key
    carry, losses = lax.scan(update, carry, None, updates)
    return carry[0], losses

  keys = jax.random.split(jax.random.key(0), members)
  params = jax.vmap(init)(keys)
  return jax.jit(jax.vmap(train)), params, jax.vmap(tx.init)(params), keys


def xlstm(
  blocks=4, width=16, heads=2, length=12, batch=2, loss_scale=LARGE_SCALE
):
  """An xLSTM: blocks of matrix and of scalar memory, in turns."""
  tx = ols.with_loss_scaling(optax.adamw(1e-3), loss_scale)
  size = width // heads

  def init(key):
    keys = jax.random.split(key, 6)
    return {
      "input": _dense(keys[0], width, 4 * width),
      "hidden": _dense(keys[1], heads, size, 4 * size),
      "gates": _dense(keys[2], width, 2 * heads),
      "out": _dense(keys[3], width, width),
      "up": _dense(keys[4], width, 2 * width),
      "down": _dense(keys[5], width, width),
    }

  def gates(log_in, log_forget, largest):
    log_forget = jax.nn.log_sigmoid(log_forget)
    new = jnp.maximum(log_forget + largest, log_in)
    return jnp.exp(log_in - new), jnp.exp(log_forget + largest - new), new

  def run_matrix_memory(params, x):
    parts = jnp.split(x @ params["input"], 4, -1)[:3]
    query, key, value = (x.reshape(length, heads, size) for x in parts)

    def step(carry, inputs):
      memory, total, largest = carry
      query, key, value, log_in, log_forget = inputs
      take, keep, largest = gates(log_in, log_forget, largest)
      key = take[:, None] * key / size**0.5
      pairs = value[:, :, None] * key[:, None, :]
      memory = keep[:, None, None] * memory + pairs
      total = keep[:, None] * total + key
      norm = jnp.abs((total * query).sum(-1))
      norm = jnp.maximum(norm, jnp.exp(-largest))
      out = jnp.einsum("hij,hj->hi", memory, query) / norm[:, None]
      return (memory, total, largest), out

    zeros = jnp.zeros((heads, size, size))
    start = zeros, zeros[..., 0], zeros[:, 0, 0]
    rows = query, key, value, *jnp.split(x @ params["gates"], 2, -1)
    return lax.scan(step, start, rows)[1]

  def run_scalar_memory(params, x):
    def step(carry, x):
      memory, total, hidden, largest = carry
      x += jnp.einsum("hi,hij->hj", hidden, params["hidden"])
      log_in, log_forget, new, out = jnp.split(x, 4, -1)
      take, keep, largest = gates(log_in, log_forget, largest)
      memory = keep * memory + take * jnp.tanh(new)
      total = keep * total + take
      hidden = jax.nn.sigmoid(out) * memory / jnp.maximum(total, 1e-6)
      return (memory, total, hidden, largest), hidden

    rows = (x @ params["input"]).reshape(length, heads, 4 * size)
    return lax.scan(step, (jnp.zeros((heads, size)),) * 4, rows)[1]

  def network(params, x):
    for i, block in enumerate(params["blocks"]):
      memory = run_scalar_memory if i % 2 else run_matrix_memory
      y = _norm(memory(block, _norm(x))).reshape(length, width)
      x += y * jax.nn.sigmoid(x @ block["out"])
      gate, y = jnp.split(_norm(x) @ block["up"], 2, -1)
      x += (jax.nn.gelu(gate) * y) @ block["down"]
    return _norm(x) @ params["head"]

  @ols.autocast
  def loss_fn(params, tokens):
    x = params["embed"][tokens[:, :-1]]
    logits = jax.vmap(network, (None, 0))(params, x)
    losses = optax.softmax_cross_entropy_with_integer_labels
    return losses(logits, tokens[:, 1:]).mean()

  keys = jax.random.split(jax.random.key(0), blocks + 2)
  params = {
    "embed": jax.random.normal(keys[0], (_VOCAB_SIZE, width)),
    "head": _dense(keys[1], width, _VOCAB_SIZE),
    "blocks": list(map(init, keys[2:])),
  }
  tokens = jax.random.randint(keys[0], (batch, length + 1), 0, _VOCAB_SIZE)
  step = functools.partial(_train_step, tx, loss_fn)
  return jax.jit(step), params, tx.init(params), tokens


def small_layers(count=100, width=16, is_scan=False, loss_scale=2.0**120):
  """Many small layers, one after the other or in a scan."""
  tx = ols.with_loss_scaling(optax.adam(1e-3), loss_scale)
  layer = lambda x, w: (jnp.tanh(x @ w), None)

  @ols.autocast
  def loss_fn(params, x):
    if is_scan:
      x, _ = lax.scan(layer, x, params)
    else:
      for w in params:
        x, _ = layer(x, w)
    return jnp.mean(x**2)

  keys = jax.random.split(jax.random.key(0), count)
  params = [_dense(key, width, width) for key in keys]
  params = jnp.stack(params) if is_scan else params
  x = jax.random.normal(jax.random.key(1), (8, width))
  step = functools.partial(_train_step, tx, loss_fn)
  return jax.jit(step), params, tx.init(params), x
