// Runs training's attention on a CPU beside LibTorch's causal kernel, for
// tests/bench/attention.py:
//   attention_bench SEQUENCES LENGTH HEADS KV_HEADS FEATURES THREADS REPS
// Both compute the forward and the backward pass of the same sequences in f32,
// in turns. Prints one JSON line with the seconds of each repetition, and the
// largest difference between their outputs and gradients.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <exception>
#include <iostream>
#include <nlohmann/json.hpp>
#include <string>
#include <tuple>
#include <vector>

#include "src/ops/tree_attention.h"

namespace {

using weft::ops::AttentionNode;
using weft::ops::AttentionOutput;
using weft::ops::AttentionRule;

struct Shape {
  int64_t sequences, length, heads, kv_heads, features;
};

struct Tensors {
  at::Tensor q, k, v, dout;  // [T, heads, C].
};

// The output, and the gradients of q, k and v, all [T, heads, C].
using Results = std::vector<at::Tensor>;

Tensors MakeTensors(const Shape& shape) {
  const int64_t rows = shape.sequences * shape.length;
  const auto random = [&](int64_t heads) {
    return at::randn({rows, heads, shape.features});
  };
  return {random(shape.heads), random(shape.kv_heads), random(shape.kv_heads),
          random(shape.heads)};
}

Results Ours(const Shape& shape, const Tensors& in, double scale) {
  std::vector<AttentionNode> nodes;
  for (int64_t i = 0; i < shape.sequences; ++i) {
    const int64_t begin = i * shape.length;
    nodes.push_back({begin, begin + shape.length, -1, begin + shape.length});
  }
  const AttentionRule rule{.scale = scale};
  const AttentionOutput forward =
      weft::ops::TreeAttention(in.q, in.k, in.v, nodes, rule);
  at::Tensor dq, dk, dv;
  weft::ops::TreeAttentionBackward(in.dout, in.q, in.k, in.v, forward, nodes,
                                   rule, dq, dk, dv);
  return {forward.out_THC, dq, dk, dv};
}

Results Peers(const Shape& shape, const Tensors& in, double scale) {
  const auto runs = [&](const at::Tensor& x) {
    return x.unflatten(0, {shape.sequences, shape.length}).transpose(1, 2);
  };
  const auto rows = [](const at::Tensor& x) {
    return x.transpose(1, 2).flatten(0, 1);
  };
  const at::Tensor q = runs(in.q), k = runs(in.k), v = runs(in.v);
  const auto [out, lse] = at::_scaled_dot_product_flash_attention_for_cpu(
      q, k, v, /*dropout_p=*/0.0, /*is_causal=*/true, /*attn_mask=*/{}, scale);
  const auto [dq, dk, dv] =
      at::_scaled_dot_product_flash_attention_for_cpu_backward(
          runs(in.dout), q, k, v, out, lse, /*dropout_p=*/0.0,
          /*is_causal=*/true, /*attn_mask=*/{}, scale);
  return {rows(out), rows(dq), rows(dk), rows(dv)};
}

double MaxDifference(const Results& a, const Results& b) {
  double worst = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    const double scale = std::max(1.0, b[i].abs().max().item<double>());
    worst = std::max(worst, (a[i] - b[i]).abs().max().item<double>() / scale);
  }
  return worst;
}

template <typename Call>
double Seconds(const Call& call) {
  const auto start = std::chrono::steady_clock::now();
  static_cast<void>(call());
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start)
      .count();
}

void Run(const Shape& shape, int64_t reps) {
  const Tensors in = MakeTensors(shape);
  const double scale = 1 / std::sqrt(static_cast<double>(shape.features));
  const auto ours = [&] { return Ours(shape, in, scale); };
  const auto peers = [&] { return Peers(shape, in, scale); };
  // The comparison also warms up.
  nlohmann::json line = {{"difference", MaxDifference(ours(), peers())}};
  for (int64_t i = 0; i < reps; ++i) {
    line["ours_seconds"].push_back(Seconds(ours));
    line["peer_seconds"].push_back(Seconds(peers));
  }
  std::cout << line << std::endl;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 8) {
    std::cerr << "usage: attention_bench SEQUENCES LENGTH HEADS KV_HEADS "
                 "FEATURES THREADS REPS\n";
    return 2;
  }
  std::vector<int64_t> numbers;
  for (int i = 1; i < 8; ++i) numbers.push_back(std::atoll(argv[i]));
  try {
    at::set_num_threads(static_cast<int>(numbers[5]));
    Run({numbers[0], numbers[1], numbers[2], numbers[3], numbers[4]},
        numbers[6]);
  } catch (const std::exception& e) {
    std::cerr << "attention_bench: " << e.what() << "\n";
    return 1;
  }
  return 0;
}
