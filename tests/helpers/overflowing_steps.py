"""Training steps that are slow to compile, each with an overflow in it."""

import functools

import jax
from jax import lax
import jax.numpy as jnp
import optax

import optax_lossscale as ols

F16 = jnp.float16


def graph_network(nodes=30, edges=80, width=16, depth=4):
  """Messages along edges, with attention, and a fault in the second layer."""
  keys = jax.random.split(jax.random.key(0), 6)
  sender, receiver = (
    jax.random.randint(key, (edges,), 0, nodes) for key in keys[:2]
  )
  shape = (depth, 2, 2 * width, width)
  params = [
    {"edge": edge, "node": node, "scale": jnp.ones(width)}
    for edge, node in jax.random.normal(keys[2], shape) / 4
  ]
  x = jax.random.normal(keys[3], (nodes, width))
  target = jax.random.normal(keys[4], (width,))

  def attend(message):
    logits = jax.nn.leaky_relu(message.sum(1))
    largest = jax.ops.segment_max(logits, receiver, nodes)
    weights = jnp.exp(logits - largest[receiver])
    total = jax.ops.segment_sum(weights, receiver, nodes)
    weights = weights / (total[receiver] + F16(1e-3))
    return jax.ops.segment_sum(message * weights[:, None], receiver, nodes)

  def loss_fn(params, x, target):
    x = x.astype(F16)
    for i, layer in enumerate(params):
      layer = jax.tree.map(lambda w: w.astype(F16), layer)
      pairs = jnp.concatenate([x[sender], x[receiver]], 1)
      message = jax.nn.relu(pairs @ layer["edge"])
      new = jnp.concatenate([x, attend(message)], 1) @ layer["node"]
      mean = new.mean(1, keepdims=True)
      rsqrt = lax.rsqrt(new.var(1, keepdims=True) + F16(1e-3))
      new = (new - mean) * rsqrt * layer["scale"]
      if i == 1:
        new = new * 40000
      x = x + jax.nn.silu(new)
    return jnp.mean((x.mean(0).astype(jnp.float32) - target) ** 2)

  return jax.value_and_grad(loss_fn), params, x, target


def layers_of_all_shapes(depth=12):
  """Dense layers of which no two have the same shape; the third overflows."""
  widths = range(20, 21 + depth)
  keys = jax.random.split(jax.random.key(0), depth)
  params = [
    jax.random.normal(key, (n, n + 1)) / n**0.5
    for key, n in zip(keys, widths, strict=False)
  ]
  x = jax.random.normal(jax.random.key(1), (8, widths[0]))

  def loss_fn(params, x):
    x = x.astype(F16)
    for i, w in enumerate(params):
      x = jax.nn.gelu(x @ w.astype(F16))
      if i == 2:
        x = jnp.square(x * 400)
    return jnp.mean(x.astype(jnp.float32) ** 2)

  return jax.value_and_grad(loss_fn), params, x


def _dense(key, *shape):
  return jax.random.normal(key, shape) / shape[-2] ** 0.5


def recurrent_ppo(
  members=2,
  envs=8,
  steps=8,
  width=16,
  epochs=2,
  minibatches=2,
  updates=2,
  loss_scale=2.0**40,
):
  """A recurrent PPO under ``vmap``: scans in scans in scans.

  The loss scale is too large, so that the backward pass overflows.
  """
  inner = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-3))
  tx = ols.with_loss_scaling(inner, loss_scale)

  def init(key):
    keys = jax.random.split(key, 7)
    return {
      "embed": _dense(keys[0], 4, width),
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

    def minibatch(trained, batch):
      params, opt_state = trained
      loss, grads = ols.value_and_grad(loss_fn, opt_state)(params, batch)
      updates, opt_state = tx.update(grads, opt_state, params)
      return (optax.apply_updates(params, updates), opt_state), loss

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
    state = jnp.full((envs, 4), 0.3)
    hidden, done = jnp.zeros((envs, width)), jnp.zeros(envs, bool)
    carry = (params, opt_state), state, hidden, done, key
    carry, losses = lax.scan(update, carry, None, updates)
    return carry[0], losses

  keys = jax.random.split(jax.random.key(0), members)
  params = jax.vmap(init)(keys)
  return jax.jit(jax.vmap(train)), params, jax.vmap(tx.init)(params), keys
