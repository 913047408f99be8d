// Runs operations of Weft on a CPU beside LibTorch's, for tests/bench/op.py:
//   op_bench attention SEQUENCES LENGTH HEADS KV_HEADS FEATURES THREADS REPS
//   op_bench grouped ROWS HIDDEN FEATURES EXPERTS THREADS REPS
// attention is the forward and the backward pass of training's attention, and
// its peer is LibTorch's causal kernel. grouped multiplies the rows of many
// experts with their weights, as src/moe does; its peers are LibTorch's grouped
// product, and a loop over the experts. Rows are dealt to the experts at
// random. All sides compute the same in f32, in turns. Prints one JSON line
// with the seconds of each repetition of each side, and the largest difference
// between the results of the other sides and those of Weft.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <functional>
#include <iostream>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <tuple>
#include <vector>

#include "src/ops/matmul.h"
#include "src/ops/tree_attention.h"
#include "tests/bench/bench.h"

namespace {

using weft::ops::AttentionNode;
using weft::ops::AttentionOutput;
using weft::ops::AttentionRule;
using weft::ops::RowCount;

using Results = std::vector<at::Tensor>;
// The sides by name. Weft's is "weft".
using Sides = std::map<std::string, std::function<Results()>>;

double MaxDifference(const Results& a, const Results& b) {
  double worst = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    const double scale = std::max(1.0, b[i].abs().max().item<double>());
    worst = std::max(worst, (a[i] - b[i]).abs().max().item<double>() / scale);
  }
  return worst;
}

void TakeTurns(const Sides& sides, int64_t reps) {
  nlohmann::json line;
  Results ours;
  for (const at::Tensor& result : sides.at("weft")()) {
    ours.push_back(result.clone());
  }
  // The comparison also warms up.
  for (const auto& [name, side] : sides) {
    if (name != "weft") line["difference"][name] = MaxDifference(side(), ours);
  }
  for (int64_t i = 0; i < reps; ++i) {
    for (const auto& [name, side] : sides) {
      const auto start = std::chrono::steady_clock::now();
      static_cast<void>(side());
      line["seconds"][name].push_back(weft::bench::SecondsSince(start));
    }
  }
  std::cout << line << std::endl;
}

// --- Attention: the output, and the gradients of q, k and v, [T, heads, C] ---

struct Sequences {
  int64_t count, length, heads, kv_heads, features;
  at::Tensor q, k, v, dout;  // [T, heads, C].

  explicit Sequences(const std::vector<int64_t>& sizes)
      : count(sizes.at(0)),
        length(sizes.at(1)),
        heads(sizes.at(2)),
        kv_heads(sizes.at(3)),
        features(sizes.at(4)),
        q(Random(heads)),
        k(Random(kv_heads)),
        v(Random(kv_heads)),
        dout(Random(heads)) {}

  at::Tensor Random(int64_t of) const {
    return at::randn({count * length, of, features});
  }
  double scale() const { return 1 / std::sqrt(static_cast<double>(features)); }
};

Results TreeAttention(const Sequences& in) {
  std::vector<AttentionNode> nodes;
  for (int64_t i = 0; i < in.count; ++i) {
    const int64_t begin = i * in.length;
    nodes.push_back({begin, begin + in.length, -1, begin + in.length});
  }
  const AttentionRule rule{.scale = in.scale()};
  const AttentionOutput forward =
      weft::ops::TreeAttention(in.q, in.k, in.v, nodes, rule);
  at::Tensor dq, dk, dv;
  weft::ops::TreeAttentionBackward(in.dout, in.q, in.k, in.v, forward, nodes,
                                   rule, dq, dk, dv);
  return {forward.out_THC, dq, dk, dv};
}

Results FlashAttention(const Sequences& in) {
  const auto runs = [&](const at::Tensor& x) {
    return x.unflatten(0, {in.count, in.length}).transpose(1, 2);
  };
  const auto rows = [](const at::Tensor& x) {
    return x.transpose(1, 2).flatten(0, 1);
  };
  const at::Tensor q = runs(in.q), k = runs(in.k), v = runs(in.v);
  const auto [out, lse] = at::_scaled_dot_product_flash_attention_for_cpu(
      q, k, v, /*dropout_p=*/0.0, /*is_causal=*/true, /*attn_mask=*/{},
      in.scale());
  const auto [dq, dk, dv] =
      at::_scaled_dot_product_flash_attention_for_cpu_backward(
          runs(in.dout), q, k, v, out, lse, /*dropout_p=*/0.0,
          /*is_causal=*/true, /*attn_mask=*/{}, in.scale());
  return {rows(out), rows(dq), rows(dk), rows(dv)};
}

// --- Grouped products. Legend: R rows, H hidden, F features, E experts -------

struct Operands {
  at::Tensor x_RH, w_EFH;
  at::Tensor ends_E;  // i32: the end of each expert's rows.
  at::Tensor y_RF;    // RunExpert writes here.

  explicit Operands(const std::vector<int64_t>& sizes)
      : x_RH(at::randn({sizes.at(0), sizes.at(1)})),
        w_EFH(at::randn({sizes.at(3), sizes.at(2), sizes.at(1)})),
        ends_E(at::bincount(at::randint(sizes[3], {sizes[0]}, at::kLong), {},
                            sizes[3])
                   .cumsum(0)
                   .to(at::kInt)),
        y_RF(at::empty({sizes[0], sizes[2]})) {}

  // Calls multiply(x, w^T) for expert `e` and keeps the result.
  template <typename Multiply>
  void RunExpert(int64_t e, const Multiply& multiply) const {
    const int64_t begin = e > 0 ? ends_E[e - 1].item<int>() : 0;
    const int64_t rows = ends_E[e].item<int>() - begin;
    if (rows == 0) return;
    y_RF.narrow(0, begin, rows)
        .copy_(multiply(x_RH.narrow(0, begin, rows), w_EFH[e].t()));
  }
};

// Each thread computes whole experts, as in src/moe.
Results Panels(const Operands& in) {
  std::atomic<int64_t> next = 0;
  at::parallel_for(0, at::get_num_threads(), 1, [&](int64_t, int64_t) {
    const at::InferenceMode no_autograd;
    for (int64_t e = next++; e < in.w_EFH.size(0); e = next++) {
      in.RunExpert(e, [](const at::Tensor& x, const at::Tensor& w) {
        return weft::ops::MatMul(x, w, {}, RowCount::kVaries);
      });
    }
  });
  return {in.y_RF};
}

Results Loop(const Operands& in) {
  for (int64_t e = 0; e < in.w_EFH.size(0); ++e) {
    in.RunExpert(e, [](const at::Tensor& x, const at::Tensor& w) {
      return at::mm(x, w);
    });
  }
  return {in.y_RF};
}

Results Grouped(const Operands& in) {
  return {at::_grouped_mm(in.x_RH, in.w_EFH.transpose(1, 2), in.ends_E)};
}

bool Run(const std::vector<std::string>& words) {
  const std::string op = words.empty() ? "" : words[0];
  const std::vector<int64_t> numbers = weft::bench::Numbers(words, 1);
  const bool is_attention = op == "attention" && numbers.size() == 7;
  if (!is_attention && !(op == "grouped" && numbers.size() == 6)) return false;
  const at::InferenceMode no_autograd;
  at::set_num_threads(static_cast<int>(numbers[numbers.size() - 2]));
  if (is_attention) {
    const Sequences in(numbers);
    TakeTurns({{"weft", [&] { return TreeAttention(in); }},
               {"LibTorch", [&] { return FlashAttention(in); }}},
              numbers.back());
  } else {
    const Operands in(numbers);
    TakeTurns({{"weft", [&] { return Panels(in); }},
               {"loop", [&] { return Loop(in); }},
               {"grouped_mm", [&] { return Grouped(in); }}},
              numbers.back());
  }
  return true;
}

}  // namespace

int main(int argc, char** argv) {
  return weft::bench::Main(argc, argv, "op_bench attention|grouped SIZES...",
                           Run);
}
