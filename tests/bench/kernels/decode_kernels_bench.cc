// Times the decode kernels for one token, and ATen code that computes the same
// results.
#include <ATen/ATen.h>
#include <benchmark/benchmark.h>

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <vector>

#include "kernels/cpu/kernels.h"
#include "kernels/cpu/paged_attention.h"

namespace weft::kernels::cpu {
namespace {

constexpr int64_t kPageTokens = 16;
// Total bytes of the keys and values, which the bench reads one sequence after
// the other. The total exceeds the caches, so every read is from memory.
constexpr int64_t kColdBytes = int64_t{256} << 20;
constexpr int64_t kVocab = 49152;

// Operands of attention. The bench's arguments are the numbers of key/value
// heads, of query heads per key/value head, of features per head, and of
// tokens.
struct Attention {
  explicit Attention(const benchmark::State& state)
      : heads(state.range(0)),
        group(state.range(1)),
        features(state.range(2)),
        tokens(state.range(3)),
        pages(tokens / kPageTokens),
        sequences(kColdBytes / (2 * tokens * heads * features * 4)),
        q(at::randn({heads * group, features})),
        k(at::randn({sequences * pages, kPageTokens, heads, features})),
        v(at::randn({sequences * pages, kPageTokens, heads, features})) {}

  int64_t heads, group, features, tokens, pages, sequences;
  at::Tensor q, k, v;
};

void CountBytes(benchmark::State& state, const Attention& a) {
  state.SetBytesProcessed(state.iterations() * a.tokens * a.heads * a.features *
                          8);
}

void PagedAttentionKernel(benchmark::State& state) {
  const Attention a(state);
  at::Tensor out = at::empty_like(a.q), lse = at::empty(a.heads * a.group);
  std::vector<int32_t> table(a.sequences * a.pages);
  std::iota(table.begin(), table.end(), 0);
  PagedAttentionItem item{.q_NGC = a.q.const_data_ptr<float>(),
                          .k_pages = a.k.const_data_ptr<float>(),
                          .v_pages = a.v.const_data_ptr<float>(),
                          .num_heads = a.heads,
                          .group_size = a.group,
                          .num_kv_heads = a.heads,
                          .head_features = a.features,
                          .page_tokens = kPageTokens,
                          .scale = 0.125F};
  int64_t sequence = 0;
  for (auto _ : state) {
    item.page_table = table.data() + sequence * a.pages;
    for (item.begin = 0; item.begin < a.tokens; item.begin = item.end) {
      item.end = std::min(item.begin + kAttentionChunk, a.tokens);
      Kernels().paged_attention(item, out.mutable_data_ptr<float>(),
                                lse.mutable_data_ptr<float>());
    }
    benchmark::ClobberMemory();
    sequence = (sequence + 1) % a.sequences;
  }
  CountBytes(state, a);
}

// Times ATen. The keys and values of a sequence are contiguous, so ATen needs
// no page table.
void AttentionAten(benchmark::State& state) {
  const Attention a(state);
  const at::Tensor q = a.q.view({a.heads, a.group, a.features});
  int64_t sequence = 0;
  for (auto _ : state) {
    const auto rows = [&](const at::Tensor& pages) {
      return pages.narrow(0, sequence * a.pages, a.pages)
          .view({a.tokens, a.heads, a.features})
          .transpose(0, 1);
    };
    const at::Tensor weights =
        at::bmm(q, rows(a.k).transpose(1, 2)).mul_(0.125).softmax(-1);
    const at::Tensor out = at::bmm(weights, rows(a.v));
    benchmark::DoNotOptimize(out.const_data_ptr());
    sequence = (sequence + 1) % a.sequences;
  }
  CountBytes(state, a);
}

void Shapes(benchmark::internal::Benchmark* bench) {
  for (const int64_t tokens : {96, 1024}) {
    bench->Args({3, 3, 64, tokens});   // SmolLM2-135M
    bench->Args({8, 4, 128, tokens});  // Llama-3.1-8B
    bench->Args({32, 1, 128, tokens});
  }
}
BENCHMARK(PagedAttentionKernel)->Apply(Shapes);
BENCHMARK(AttentionAten)->Apply(Shapes);

// Computes the sampling weights of a row of logits, block by block, as the
// sampler does.
void WeighVocabKernel(benchmark::State& state) {
  constexpr int64_t kBlock = 512;
  const at::Tensor logits = at::randn(kVocab);
  std::vector<float> weights(kBlock);
  const auto* row = logits.const_data_ptr<float>();
  for (auto _ : state) {
    const float max = Kernels().max_block(row, kVocab);
    double total = 0;
    for (int64_t begin = 0; begin < kVocab; begin += kBlock) {
      total += Kernels().weigh_block(row + begin, kBlock, max, 1.25F,
                                     weights.data());
    }
    benchmark::DoNotOptimize(total);
  }
}
BENCHMARK(WeighVocabKernel);

void WeighVocabAten(benchmark::State& state) {
  const at::Tensor logits = at::randn(kVocab);
  for (auto _ : state) {
    const at::Tensor p = logits.mul(1.25).softmax(0);
    benchmark::DoNotOptimize(p.const_data_ptr());
  }
}
BENCHMARK(WeighVocabAten);

}  // namespace
}  // namespace weft::kernels::cpu
