// Compares the decoder over paged keys and values with the decoder without
// pages.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "src/model/decoder.h"
#include "tests/model/tiny_model.h"
#include "tests/support/tolerance.h"

namespace weft::model {
namespace {

constexpr int64_t kPageTokens = 4;
constexpr int64_t kPages = 12;

// One sequence of the test: its tokens, its pages (out of order and mixed with
// the other sequence's), and how many tokens are its prompt.
struct Story {
  std::vector<int64_t> tokens;
  std::vector<int32_t> pages;
  int64_t prompt;
  lora::AdapterVersionPtr version;  // Null: the base model.

  int64_t Slot(int64_t token) const {
    return int64_t{pages[token / kPageTokens]} * kPageTokens +
           token % kPageTokens;
  }
};

// How the test's decoder differs from TinyConfig.
struct Variant {
  const char* name;
  model_config::QkNorm qk_norm = model_config::QkNorm::kNone;
  int64_t window = 0;  // The first layer's window. Some prompts are longer.
  double softcap = 0;
};

class DecoderCacheTest : public ::testing::TestWithParam<Variant> {
 protected:
  DecoderCacheTest() : decoder_(MakeDecoder(GetParam(), at::kFloat)) {
    stories_ = MakeStories(decoder_);
    store_ = MakeStore(decoder_);
  }

  static Decoder MakeDecoder(const Variant& variant, at::ScalarType dtype) {
    // With a model of this size, several threads would only wait for each
    // other.
    at::set_num_threads(1);
    at::manual_seed(29);
    model_config::ModelConfig config = TinyConfig();
    config.qk_norm = variant.qk_norm;
    config.attention[0].rule.window = variant.window;
    for (model_config::LayerAttention& layer : config.attention) {
      layer.rule.softcap = variant.softcap;
    }
    DecoderWeights weights = TinyWeights(config, dtype);
    return {config, std::move(weights), config.max_positions};
  }

  static std::vector<Story> MakeStories(const Decoder& decoder) {
    std::vector<Story> stories = {{.pages = {7, 2, 9, 4}, .prompt = 6},
                                  {.pages = {0, 11, 5, 1}, .prompt = 4}};
    for (Story& story : stories) {
      // The 8 tokens after the prompt cross the end of a page.
      const int64_t length = story.prompt + 8;
      const at::Tensor drawn =
          at::randint(decoder.config().vocab, {length}, at::kLong);
      const auto* data = drawn.const_data_ptr<int64_t>();
      story.tokens.assign(data, data + length);
    }
    LoraConfig config{.rank = 3, .alpha = 6};
    config.target_modules.push_back(TargetModule::kEmbedTokens);
    stories[1].version = TinyVersion(decoder.config(), config, decoder.dtype());
    return stories;
  }

  // The store holds NaN, so that reading an unwritten slot shows in the result.
  static KvStore MakeStore(const Decoder& decoder) {
    const model_config::ModelConfig& config = decoder.config();
    KvStore store;
    for (int layer = 0; layer < config.num_layers; ++layer) {
      for (auto* pages : {&store.k_pages_PSKC, &store.v_pages_PSKC}) {
        pages->push_back(at::full(
            {kPages, kPageTokens, config.num_kv_heads, config.head_dim}, NAN,
            decoder.dtype()));
      }
    }
    return store;
  }

  // Packs the first lengths[s] tokens of each story s, one story after another.
  static PackedBatch Pack(const std::vector<Story>& stories,
                          const std::vector<int64_t>& lengths) {
    std::vector<int64_t> tokens;
    std::vector<int32_t> positions;
    PackedBatch batch;
    for (size_t s = 0; s < stories.size(); ++s) {
      const auto begin = static_cast<int64_t>(tokens.size());
      for (int64_t i = 0; i < lengths[s]; ++i) {
        tokens.push_back(stories[s].tokens[i]);
        positions.push_back(static_cast<int32_t>(i));
      }
      const int64_t end = begin + lengths[s];
      batch.nodes.push_back({.begin = begin, .end = end, .subtree_end = end});
      if (stories[s].version == nullptr) continue;
      batch.routing.push_back(
          {.begin = begin, .end = end, .version = stories[s].version});
    }
    batch.tokens_T = at::tensor(tokens, at::kLong);
    batch.positions_T = at::tensor(positions, at::kInt);
    return batch;
  }

  // Prefills tokens [begins[i], begins[i] + counts[i]) of story i, whose
  // earlier tokens are in the store.
  at::Tensor PrefillFrom(const std::vector<int64_t>& begins,
                         const std::vector<int64_t>& counts, KvStore* store) {
    std::vector<int64_t> tokens, slots, key_slots;
    std::vector<int32_t> positions;
    PackedBatch batch;
    KvAccess kv{.store = store};
    for (size_t s = 0; s < begins.size(); ++s) {
      const Story& story = stories_[s];
      const auto row = static_cast<int64_t>(tokens.size());
      const int64_t end = begins[s] + counts[s];
      kv.suffixes.push_back(
          {row, counts[s], static_cast<int64_t>(key_slots.size()), end});
      for (int64_t i = 0; i < end; ++i) key_slots.push_back(story.Slot(i));
      for (int64_t i = begins[s]; i < end; ++i) {
        tokens.push_back(story.tokens[i]);
        positions.push_back(static_cast<int32_t>(i));
        slots.push_back(story.Slot(i));
      }
      if (story.version == nullptr) continue;
      batch.routing.push_back(
          {.begin = row, .end = row + counts[s], .version = story.version});
    }
    batch.tokens_T = at::tensor(tokens, at::kLong);
    batch.positions_T = at::tensor(positions, at::kInt);
    kv.slots_T = at::tensor(slots, at::kLong);
    kv.key_slots_S = at::tensor(key_slots, at::kLong);
    return Evaluate(decoder_, batch, &kv);
  }

  static at::Tensor Evaluate(const Decoder& decoder, const PackedBatch& batch,
                             KvAccess* kv) {
    return decoder.ForwardLayers(Mode::kEval, batch, /*tape=*/nullptr,
                                 /*num_recomputed=*/0, kv);
  }

  static at::Tensor Prefill(const Decoder& decoder,
                            const std::vector<Story>& stories, KvStore* store) {
    std::vector<int64_t> slots, lengths;
    for (const Story& story : stories) {
      lengths.push_back(story.prompt);
      for (int64_t i = 0; i < story.prompt; ++i) {
        slots.push_back(story.Slot(i));
      }
    }
    KvAccess kv{.store = store, .slots_T = at::tensor(slots, at::kLong)};
    return Evaluate(decoder, Pack(stories, lengths), &kv);
  }

  // Decodes one more token of each story, after `done` decoded tokens. Each
  // story has one row.
  static at::Tensor DecodeStep(const Decoder& decoder,
                               const std::vector<Story>& stories, int64_t done,
                               KvStore* store) {
    std::vector<int64_t> tokens, slots;
    std::vector<int32_t> positions, lengths, table;
    PackedBatch batch;
    for (const Story& story : stories) {
      const int64_t position = story.prompt + done;
      if (story.version != nullptr) {
        const auto row = static_cast<int64_t>(tokens.size());
        batch.routing.push_back(
            {.begin = row, .end = row + 1, .version = story.version});
      }
      tokens.push_back(story.tokens[position]);
      slots.push_back(story.Slot(position));
      positions.push_back(static_cast<int32_t>(position));
      lengths.push_back(static_cast<int32_t>(position + 1));
      table.insert(table.end(), story.pages.begin(), story.pages.end());
    }
    const auto rows = static_cast<int64_t>(stories.size());
    batch.tokens_T = at::tensor(tokens, at::kLong);
    batch.positions_T = at::tensor(positions, at::kInt);
    KvAccess kv{.store = store,
                .slots_T = at::tensor(slots, at::kLong),
                .decode = true,
                .page_table_TL = at::tensor(table, at::kInt).view({rows, -1}),
                .lengths_T = at::tensor(lengths, at::kInt)};
    return Evaluate(decoder, batch, &kv);
  }

  // Prefills each story and decodes eight tokens. Compares the decoded rows
  // with the rows of one pass over all tokens.
  static void ExpectDecodeIsForward(const Decoder& decoder,
                                    const std::vector<Story>& stories,
                                    KvStore store, double epsilon) {
    std::vector<int64_t> lengths, begins;
    int64_t total = 0;
    for (const Story& story : stories) {
      begins.push_back(total);
      lengths.push_back(static_cast<int64_t>(story.tokens.size()));
      total += lengths.back();
    }
    const at::Tensor full =
        Evaluate(decoder, Pack(stories, lengths), /*kv=*/nullptr)
            .to(at::kDouble);
    const double magnitude = std::max(1.0, full.abs().max().item<double>());
    // The errors of all layers' reductions add up.
    const model_config::ModelShape shape = decoder.config().shape();
    const int64_t terms = shape.num_layers * (4 * shape.hidden + shape.q_width +
                                              shape.ffn + total);
    const double tolerance = Tolerance(epsilon, terms, magnitude);
    (void)Prefill(decoder, stories, &store);
    for (int64_t done = 0; done < 8; ++done) {
      const at::Tensor rows =
          DecodeStep(decoder, stories, done, &store).to(at::kDouble);
      for (size_t s = 0; s < stories.size(); ++s) {
        const at::Tensor expected = full[begins[s] + stories[s].prompt + done];
        const double error = (rows[static_cast<int64_t>(s)] - expected)
                                 .abs()
                                 .max()
                                 .item<double>();
        EXPECT_LE(error, tolerance) << "story " << s << ", token " << done;
      }
    }
  }

  Decoder decoder_;
  std::vector<Story> stories_;
  KvStore store_;
};

TEST_P(DecoderCacheTest, DecodingTokenByTokenIsTheFullForward) {
  ExpectDecodeIsForward(decoder_, stories_, store_, kEpsilonF32);
}

// A CPU stores weights in bf16 and computes in f32.
TEST_P(DecoderCacheTest, DecodesFromBf16WeightsInF32) {
  const Decoder decoder = MakeDecoder(GetParam(), at::kBFloat16);
  EXPECT_EQ(decoder.dtype(), at::kFloat);
  ExpectDecodeIsForward(decoder, MakeStories(decoder), MakeStore(decoder),
                        kEpsilonF32);
}

TEST_P(DecoderCacheTest, FillingTheCacheDoesNotChangeTheOutput) {
  std::vector<int64_t> prompts;
  for (const Story& story : stories_) prompts.push_back(story.prompt);
  EXPECT_TRUE(
      at::equal(Prefill(decoder_, stories_, &store_),
                Evaluate(decoder_, Pack(stories_, prompts), /*kv=*/nullptr)));
}

TEST_P(DecoderCacheTest, WritesTheSlotsOfTheBatchAndNoOther) {
  (void)Prefill(decoder_, stories_, &store_);
  std::vector<bool> written(kPages * kPageTokens, false);
  for (const Story& story : stories_) {
    for (int64_t i = 0; i < story.prompt; ++i) written[story.Slot(i)] = true;
  }
  for (const auto* pages : {&store_.k_pages_PSKC, &store_.v_pages_PSKC}) {
    for (const at::Tensor& layer : *pages) {
      const at::Tensor slots = layer.flatten(0, 1).flatten(1);
      for (int64_t slot = 0; slot < slots.size(0); ++slot) {
        EXPECT_EQ(slots[slot].isnan().any().item<bool>(), !written[slot]);
        EXPECT_EQ(slots[slot].isnan().all().item<bool>(), !written[slot]);
      }
    }
  }
}

TEST_P(DecoderCacheTest, NanOfOneSequenceStaysInItsPages) {
  (void)Prefill(decoder_, stories_, &store_);
  KvStore clean;
  for (int layer = 0; layer < 2; ++layer) {
    clean.k_pages_PSKC.push_back(store_.k_pages_PSKC[layer].clone());
    clean.v_pages_PSKC.push_back(store_.v_pages_PSKC[layer].clone());
    store_.k_pages_PSKC[layer][stories_[0].pages[0]].fill_(NAN);
  }
  const at::Tensor before = DecodeStep(decoder_, stories_, 0, &clean);
  const at::Tensor after = DecodeStep(decoder_, stories_, 0, &store_);
  EXPECT_TRUE(after[0].isnan().all().item<bool>());
  EXPECT_TRUE(at::equal(before[1], after[1]));
}

// The second piece of one story's prompt runs in a batch with the whole prompt
// of the other story.
TEST_P(DecoderCacheTest, PrefillInPiecesIsTheFullForward) {
  const std::vector<int64_t> lengths = {stories_[0].prompt, stories_[1].prompt};
  const at::Tensor full =
      Evaluate(decoder_, Pack(stories_, lengths), /*kv=*/nullptr);
  for (const int64_t past : {1, 4, 5}) {
    KvStore store = MakeStore(decoder_);
    const at::Tensor first = PrefillFrom({0}, {past}, &store);
    const at::Tensor rest =
        PrefillFrom({past, 0}, {lengths[0] - past, lengths[1]}, &store);
    const at::Tensor pieces = at::cat({first, rest});
    const model_config::ModelShape shape = decoder_.config().shape();
    const int64_t terms = shape.num_layers * (4 * shape.hidden + shape.q_width +
                                              shape.ffn + full.size(0));
    EXPECT_LE((pieces - full).abs().max().item<double>(),
              Tolerance(kEpsilonF32, terms,
                        std::max(1.0, full.abs().max().item<double>())))
        << past;
  }
}

INSTANTIATE_TEST_SUITE_P(
    EveryVariant, DecoderCacheTest,
    ::testing::Values(Variant{.name = "Plain"},
                      Variant{.name = "QkNorm",
                              .qk_norm = model_config::QkNorm::kHead},
                      Variant{.name = "Window", .window = 5},
                      Variant{.name = "WindowAndSoftcap",
                              .qk_norm = model_config::QkNorm::kHead,
                              .window = 3,
                              .softcap = 1.5}),
    [](const auto& variant) { return std::string(variant.param.name); });

}  // namespace
}  // namespace weft::model
