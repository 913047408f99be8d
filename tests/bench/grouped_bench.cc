// For tests/bench/grouped.py, multiplies the rows of many experts with their
// weights on a CPU in three ways: as src/moe does, by LibTorch's grouped
// product, and in a loop over the experts.
//   grouped_bench ROWS HIDDEN FEATURES EXPERTS THREADS REPS
// Rows are dealt to the experts at random. All sides compute the same products
// in f32, in turns. Prints one JSON line with the seconds of each repetition,
// and the largest difference between the results.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <exception>
#include <functional>
#include <iostream>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "src/ops/matmul.h"

namespace {

using weft::ops::RowCount;

// Legend: R rows, H hidden, F features, E experts.
struct Operands {
  at::Tensor x_RH, w_EFH;
  at::Tensor ends_E;  // i32: the end of each expert's rows.
  at::Tensor y_RF;    // RunExpert writes here.

  Operands(int64_t rows, int64_t hidden, int64_t features, int64_t experts)
      : x_RH(at::randn({rows, hidden})),
        w_EFH(at::randn({experts, features, hidden})),
        ends_E(
            at::bincount(at::randint(experts, {rows}, at::kLong), {}, experts)
                .cumsum(0)
                .to(at::kInt)),
        y_RF(at::empty({rows, features})) {}

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
at::Tensor Panels(const Operands& in) {
  std::atomic<int64_t> next = 0;
  at::parallel_for(0, at::get_num_threads(), 1, [&](int64_t, int64_t) {
    const at::InferenceMode no_autograd;
    for (int64_t e = next++; e < in.w_EFH.size(0); e = next++) {
      in.RunExpert(e, [](const at::Tensor& x, const at::Tensor& w) {
        return weft::ops::MatMul(x, w, {}, RowCount::kVaries);
      });
    }
  });
  return in.y_RF;
}

at::Tensor Loop(const Operands& in) {
  for (int64_t e = 0; e < in.w_EFH.size(0); ++e) {
    in.RunExpert(e, [](const at::Tensor& x, const at::Tensor& w) {
      return at::mm(x, w);
    });
  }
  return in.y_RF;
}

at::Tensor Grouped(const Operands& in) {
  return at::_grouped_mm(in.x_RH, in.w_EFH.transpose(1, 2), in.ends_E);
}

void Run(const Operands& in, int64_t reps) {
  const std::map<std::string, std::function<at::Tensor()>> sides = {
      {"weft", [&] { return Panels(in); }},
      {"loop", [&] { return Loop(in); }},
      {"grouped_mm", [&] { return Grouped(in); }}};
  // The comparison also warms up.
  nlohmann::json line;
  const at::Tensor expected = Loop(in).clone();
  for (const auto& [name, side] : sides) {
    line["difference"][name] =
        ((side() - expected).abs().max() / expected.abs().max()).item<double>();
  }
  for (int64_t i = 0; i < reps; ++i) {
    for (const auto& [name, side] : sides) {
      const auto start = std::chrono::steady_clock::now();
      static_cast<void>(side());
      const std::chrono::duration<double> seconds =
          std::chrono::steady_clock::now() - start;
      line["seconds"][name].push_back(seconds.count());
    }
  }
  std::cout << line << std::endl;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 7) {
    std::cerr << "usage: grouped_bench ROWS HIDDEN FEATURES EXPERTS THREADS "
                 "REPS\n";
    return 2;
  }
  std::vector<int64_t> numbers;
  for (int i = 1; i < 7; ++i) numbers.push_back(std::atoll(argv[i]));
  try {
    const at::InferenceMode no_autograd;
    at::set_num_threads(static_cast<int>(numbers[4]));
    Run({numbers[0], numbers[1], numbers[2], numbers[3]}, numbers[5]);
  } catch (const std::exception& e) {
    std::cerr << "grouped_bench: " << e.what() << "\n";
    return 1;
  }
  return 0;
}
