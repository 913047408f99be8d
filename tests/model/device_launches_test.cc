// Tests how many kernels a layer launches: the launches of two layers minus
// those of one layer, on the device of tests/support/host_device. A failing
// test prints the launches by name. Also tests that a graph can record a decode
// step.
#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "src/lora/lora_cuda.h"
#include "src/model/decoder.h"
#include "tests/model/device_decoder.h"
#include "tests/model/int8_weights.h"
#include "tests/model/tiny_hybrid.h"
#include "tests/support/host_device/host_device.h"
#include "tests/support/op_observer.h"

namespace weft::testing {
namespace {

using model::Decoder;
using model::KvAccess;
using model::KvStore;
using model::Mode;
using model::PackedBatch;

const at::TensorOptions kBf16OnDevice =
    at::TensorOptions(at::kBFloat16).device(at::kCUDA);
constexpr int64_t kSequences = 4;
constexpr int64_t kPageTokens = 4;
// Segments have more than 16 rows, because segments of fewer rows take other
// kernels.
constexpr int64_t kTrainRows = 40;
constexpr int64_t kManyRows = 8;

// Launches of a layer that decodes. Adapters add two launches to each of its
// four products.
constexpr int kDecodeLaunches = 9;
constexpr int kDecodeLaunchesWithAdapters = kDecodeLaunches + 8;
// The same for a layer that attends and has experts with a shared one. Adapters
// add two launches to each of its six products, and one that finds the
// adapters of the experts' rows.
constexpr int kDecodeLaunchesOfExperts = 30;

using Counts = std::map<std::string, int>;

Counts CountsOf(const std::vector<std::string>& launches) {
  Counts counts;
  for (const std::string& name : launches) ++counts[name];
  return counts;
}

int Sum(const Counts& counts) {
  int sum = 0;
  for (const auto& [name, count] : counts) sum += count;
  return sum;
}

std::string ListOf(const Counts& counts) {
  std::ostringstream list;
  for (const auto& [name, count] : counts) {
    if (count != 0) list << "  " << count << " " << name << "\n";
  }
  return list.str();
}

// Returns what the second list has in addition to the first.
Counts Beyond(const std::vector<std::string>& fewer,
              const std::vector<std::string>& more) {
  Counts counts = CountsOf(more);
  for (const std::string& name : fewer) --counts[name];
  return counts;
}

// The tensors on the device that a decode step reads.
struct StepValues {
  PackedBatch batch;
  KvAccess kv;  // Its store is the next member.
  KvStore store;
};

constexpr std::array kStoreParts = {&KvStore::k_pages_PSKC,
                                    &KvStore::v_pages_PSKC, &KvStore::conv_NRW,
                                    &KvStore::delta_NHKV};

// A decode step as a graph records it. Its inputs stay at the same addresses,
// and the host does not know their values.
class RecordedStep {
 public:
  RecordedStep(const Decoder& decoder, const StepValues& values)
      : decoder_(decoder),
        table_(std::make_shared<lora::cuda::DecodeTable>(
            lora::cuda::DecodeCapacity{
                .rows = kSequences, .layouts = 2, .rank = 16},
            decoder.local_config().shape())),
        bytes_(at::empty({static_cast<int64_t>(table_->num_bytes())},
                         kBf16OnDevice.dtype(at::kByte))),
        places_{
            .batch = {.tokens_T = at::empty_like(values.batch.tokens_T),
                      .positions_T = at::empty_like(values.batch.positions_T),
                      .table = table_},
            .kv = {.slots_T = at::empty_like(values.kv.slots_T),
                   .decode = true,
                   .page_table_TL = at::empty_like(values.kv.page_table_TL),
                   .lengths_T = at::empty_like(values.kv.lengths_T),
                   .state_slots_Q = at::empty_like(values.kv.state_slots_Q)},
            .store = StoreTo(values.store, kBf16OnDevice)} {
    table_->Bind(bytes_.const_data_ptr());
    places_.kv.store = &places_.store;
  }
  RecordedStep(const RecordedStep&) = delete;
  RecordedStep& operator=(const RecordedStep&) = delete;

  // Copies `values`, which have the same sizes, to the step's inputs.
  void Put(const StepValues& values) {
    std::vector<std::byte> host(table_->num_bytes());
    ASSERT_TRUE(table_->Fits(values.batch.routing));
    table_->Write(values.batch.routing, host);
    bytes_.copy_(at::from_blob(host.data(), bytes_.sizes(), at::kByte));
    places_.batch.tokens_T.copy_(values.batch.tokens_T);
    places_.batch.positions_T.copy_(values.batch.positions_T);
    places_.kv.slots_T.copy_(values.kv.slots_T);
    places_.kv.page_table_TL.copy_(values.kv.page_table_TL);
    places_.kv.lengths_T.copy_(values.kv.lengths_T);
    places_.kv.state_slots_Q.copy_(values.kv.state_slots_Q);
    for (const auto part : kStoreParts) {
      for (size_t layer = 0; layer < (values.store.*part).size(); ++layer) {
        const at::Tensor& from = (values.store.*part)[layer];
        if (from.defined()) (places_.store.*part)[layer].copy_(from);
      }
    }
    if (values.store.experts_PSE.defined()) {
      places_.store.experts_PSE.copy_(values.store.experts_PSE);
    }
  }

  at::Tensor Run() {
    return decoder_.ForwardLayers(Mode::kEval, places_.batch, nullptr, 0,
                                  &places_.kv);
  }
  const KvStore& store() const { return places_.store; }

 private:
  const Decoder& decoder_;
  const std::shared_ptr<lora::cuda::DecodeTable> table_;
  const at::Tensor bytes_;  // The bytes of the table.
  StepValues places_;
};

class DeviceLaunchesTest : public ::testing::Test {
 protected:
  DeviceLaunchesTest() { at::set_num_threads(1); }

  static Decoder MakeDecoder(int num_layers, bool is_int8 = false) {
    at::manual_seed(3);
    const model_config::ModelConfig config = WideConfig(num_layers);
    const model::DecoderWeights weights = TinyWeights(config, at::kBFloat16);
    return {config,
            WeightsTo(is_int8 ? Quantized(weights) : weights, kBf16OnDevice),
            config.max_positions};
  }

  // Two of three layers compute a gated delta rule.
  static Decoder MakeHybrid() {
    at::manual_seed(3);
    model_config::ModelConfig config = WideConfig(/*num_layers=*/3);
    config.delta = WideDelta();
    return {config,
            WeightsTo(HybridWeights(config, at::kBFloat16), kBf16OnDevice),
            config.max_positions};
  }

  // Makes rows of two adapters with different ranks and, between them, rows
  // without adapter.
  static lora::LoraRouting MakeRouting(const model_config::ModelConfig& config,
                                       int64_t rows) {
    const auto version = [&](int rank) {
      return TinyVersion(config, {.rank = rank, .alpha = 8}, at::kBFloat16);
    };
    return {{.begin = 0, .end = rows / 2, .version = version(8)},
            {.begin = rows / 2 + 1, .end = rows, .version = version(16)}};
  }

  static DeviceEvents Decode(int num_layers, bool with_adapters, bool is_int8) {
    const Decoder decoder = MakeDecoder(num_layers, is_int8);
    const model_config::ModelConfig& config = decoder.config();
    PackedBatch batch{.tokens_T = at::arange(kSequences) + 7,
                      .positions_T = at::arange(kSequences).to(at::kInt) + 3};
    if (with_adapters) batch.routing = MakeRouting(config, kSequences);
    batch = BatchTo(std::move(batch), kBf16OnDevice);
    KvStore store = StoreTo(RandomStore(config, 2 * kSequences, kPageTokens),
                            kBf16OnDevice);
    KvAccess kv = AccessTo(
        {.slots_T = at::arange(kSequences) * 2 * kPageTokens + 5,
         .decode = true,
         .page_table_TL = at::arange(2 * kSequences, at::kInt).view({-1, 2}),
         .lengths_T = at::full({kSequences}, 6, at::kInt)},
        &store, at::kCUDA);
    const DeviceRecording recording;
    static_cast<void>(
        decoder.ForwardLayers(Mode::kEval, batch, nullptr, 0, &kv));
    return recording.events();
  }

  // Makes the values of a step over sequences of `length` or more tokens. With
  // `is_padded` the last row is padding. State 0 is for padding.
  static StepValues MakeValues(const model_config::ModelConfig& config,
                               int64_t length, bool is_padded,
                               lora::LoraRouting routing) {
    const at::Tensor positions_T = at::arange(kSequences) + length - 1;
    const at::Tensor pages_TL = (at::arange(2 * kSequences) * 3 + length)
                                    .remainder(2 * kSequences)
                                    .view({-1, 2});
    const at::Tensor page_T =
        pages_TL.gather(1, positions_T.floor_divide(kPageTokens).unsqueeze(1))
            .squeeze(1);
    at::Tensor slots_T =
        page_T * kPageTokens + positions_T.remainder(kPageTokens);
    at::Tensor lengths_T = (positions_T + 1).to(at::kInt);
    at::Tensor states_Q = at::arange(kSequences, 0, -1) + length - 3;
    if (is_padded) {
      slots_T[kSequences - 1] = -1;
      lengths_T[kSequences - 1] = 0;
      states_Q[kSequences - 1] = 0;
    }
    return {.batch = BatchTo({.tokens_T = at::arange(kSequences) + 5 * length,
                              .positions_T = positions_T.to(at::kInt),
                              .routing = std::move(routing)},
                             kBf16OnDevice),
            .kv = AccessTo({.slots_T = slots_T,
                            .decode = true,
                            .page_table_TL = pages_TL.to(at::kInt),
                            .lengths_T = lengths_T,
                            .state_slots_Q = states_Q},
                           /*store=*/nullptr, at::kCUDA),
            .store = StoreTo(RandomStore(config, 2 * kSequences, kPageTokens),
                             kBf16OnDevice)};
  }

  // Decodes kManyRows rows of a model like Qwen3.5-MoE: of four layers, three
  // compute a gated delta rule and one attends; all have experts, of which one
  // is shared. The rows have the adapters in turn, if there are any.
  static DeviceEvents DecodeHybridExperts(int num_layers,
                                          int64_t num_adapters) {
    const Decoder decoder = MakeHybridExperts(num_layers);
    const model_config::ModelConfig& config = decoder.config();
    std::vector<lora::AdapterVersionPtr> versions;
    for (int64_t i = 0; i < num_adapters; ++i) {
      versions.push_back(
          TinyVersion(config, {.rank = 4, .alpha = 8}, at::kBFloat16));
    }
    PackedBatch batch{.tokens_T = at::arange(kManyRows) % config.vocab,
                      .positions_T = at::full({kManyRows}, 3, at::kInt)};
    const int64_t rows = kManyRows / std::max<int64_t>(num_adapters, 1);
    for (int64_t i = 0; i < num_adapters; ++i) {
      batch.routing.push_back(
          {.begin = i * rows, .end = (i + 1) * rows, .version = versions[i]});
    }
    batch = BatchTo(std::move(batch), kBf16OnDevice);
    KvStore store = StoreTo(HybridStore(config), kBf16OnDevice);
    KvAccess kv = AccessTo(
        {.slots_T = at::arange(kManyRows) * kPageTokens + 3,
         .decode = true,
         .page_table_TL = at::arange(kManyRows, at::kInt).view({-1, 1}),
         .lengths_T = at::full({kManyRows}, 4, at::kInt),
         .state_slots_Q = at::arange(kManyRows)},
        &store, at::kCUDA);
    const DeviceRecording recording;
    static_cast<void>(
        decoder.ForwardLayers(Mode::kEval, batch, nullptr, 0, &kv));
    return recording.events();
  }

  static Decoder MakeHybridExperts(int num_layers) {
    at::manual_seed(3);
    const model_config::ModelConfig config = HybridExperts(num_layers);
    return {config,
            WeightsTo(HybridWeights(config, at::kBFloat16), kBf16OnDevice),
            config.max_positions};
  }

  static model_config::ModelConfig HybridExperts(int num_layers) {
    model_config::ModelConfig config = WideConfig(num_layers);
    config.delta = HybridConfig().delta;
    config.delta.layers.clear();
    for (int layer = 0; layer < num_layers; ++layer) {
      config.delta.layers.push_back(layer % 4 != 3);
    }
    config.moe.shape = {.count = 8,
                        .per_token = 2,
                        .ffn = 16,
                        .shared_ffn = 24,
                        .layers = std::vector<bool>(num_layers, true)};
    return config;
  }

  // Makes a store with a page and a state for each of kManyRows sequences.
  static KvStore HybridStore(const model_config::ModelConfig& config) {
    KvStore store = RandomStore(config, kManyRows, kPageTokens);
    const model_config::DeltaShape& delta = config.delta;
    for (int layer = 0; layer < config.num_layers; ++layer) {
      store.conv_NRW.push_back(
          RandomTensor({kManyRows, delta.conv_kernel - 1, delta.conv_width()},
                       1, at::kBFloat16));
      store.delta_NHKV.push_back(
          RandomTensor({kManyRows, delta.value_heads, delta.key_features,
                        delta.value_features},
                       1, at::kFloat));
    }
    return store;
  }

  struct Step {
    DeviceEvents forward;
    DeviceEvents backward;
  };
  static Step Train(int num_layers, bool with_adapters) {
    return TrainOn(MakeDecoder(num_layers), with_adapters);
  }

  // Trains a model whose layers have this many experts, with adapters. Every
  // token has expert 0 and one of the others. So expert 0 has long segments,
  // and the others have short ones.
  static Step TrainExperts(int num_layers, int num_experts) {
    model_config::ModelConfig config = WideConfig(num_layers);
    config.moe.shape = {.count = num_experts,
                        .per_token = 2,
                        .ffn = 64,
                        .layers = std::vector<bool>(num_layers, true)};
    at::manual_seed(3);
    const at::Tensor other_T = at::arange(kTrainRows) % (num_experts - 1) + 1;
    const at::Tensor experts_TK =
        at::stack({at::zeros_like(other_T), other_T}, 1);
    return TrainOn(
        {config, WeightsTo(TinyWeights(config, at::kBFloat16), kBf16OnDevice),
         config.max_positions},
        /*with_adapters=*/true,
        experts_TK.repeat({1, num_layers}).to(at::kShort));
  }

  static Step TrainOn(const Decoder& decoder, bool with_adapters,
                      const at::Tensor& experts_TE = {}) {
    PackedBatch batch{
        .tokens_T = at::arange(kTrainRows),
        .positions_T = at::cat({at::arange(10), at::arange(30)}).to(at::kInt),
        .nodes = {{0, 10, -1, 10}, {10, kTrainRows, -1, kTrainRows}},
        .experts_TE = experts_TE};
    if (with_adapters) {
      batch.routing = MakeRouting(decoder.config(), kTrainRows);
    }
    batch = BatchTo(std::move(batch), kBf16OnDevice);
    model::Tape tape;
    Step step;
    at::Tensor x_TH;
    {
      const DeviceRecording recording;
      x_TH = decoder.ForwardLayers(Mode::kTrain, batch, &tape, 0, nullptr);
      step.forward = recording.events();
    }
    const lora::LoraGradients gradients = TinyGradients(batch.routing);
    const DeviceRecording recording;
    decoder.BackwardLayers(batch, tape, at::ones_like(x_TH), gradients);
    step.backward = recording.events();
    return step;
  }

  // Expects the same bits from a recorded step and from passes whose routing
  // the host knows: results, pages and states.
  static void ExpectSameAtFixedPlaces(const Decoder& decoder) {
    const model_config::ModelConfig& config = decoder.config();
    const auto version = [&](const LoraConfig& lora) {
      return TinyVersion(config, lora, at::kBFloat16);
    };
    using enum TargetModule;
    const std::vector<StepValues> all = {
        MakeValues(config, 3, true, MakeRouting(config, kSequences - 1)),
        MakeValues(config, 5, false,
                   {{.begin = 0,
                     .end = 3,
                     .version = version({.rank = 4,
                                         .alpha = 8,
                                         .target_modules = {kVProj, kUpProj}})},
                    {.begin = 3,
                     .end = kSequences,
                     .version = version({.rank = 16, .alpha = 4})}}),
        MakeValues(config, 4, false,
                   {{.begin = 2,
                     .end = 3,
                     .version = version({.rank = 8, .alpha = 4})}})};
    RecordedStep step(decoder, all[0]);
    for (const StepValues& values : all) {
      step.Put(values);
      const at::Tensor x_TH = step.Run();
      KvStore store = StoreTo(values.store, kBf16OnDevice);
      KvAccess kv = AccessTo(values.kv, &store, at::kCUDA);
      const at::Tensor expected_TH =
          decoder.ForwardLayers(Mode::kEval, values.batch, nullptr, 0, &kv);
      EXPECT_TRUE(at::equal(x_TH.cpu(), expected_TH.cpu()));
      for (const auto part : kStoreParts) {
        for (size_t layer = 0; layer < (store.*part).size(); ++layer) {
          const at::Tensor& expected = (store.*part)[layer];
          if (!expected.defined()) continue;
          EXPECT_TRUE(
              at::equal((step.store().*part)[layer].cpu(), expected.cpu()));
        }
      }
      if (!store.experts_PSE.defined()) continue;
      EXPECT_TRUE(
          at::equal(step.store().experts_PSE.cpu(), store.experts_PSE.cpu()));
    }
  }

  static void ExpectAtMost(int limit, const DeviceEvents& one_layer,
                           const DeviceEvents& two_layers) {
    const Counts counts = Beyond(one_layer.launches, two_layers.launches);
    EXPECT_LE(Sum(counts), limit) << ListOf(counts);
    // The host reads nothing back in the layers.
    EXPECT_THAT(two_layers.waits, ::testing::IsEmpty());
  }

  const c10::InferenceMode no_autograd_;
};

TEST_F(DeviceLaunchesTest, DecodesALayerInFew) {
  for (const bool is_int8 : {false, true}) {
    ExpectAtMost(kDecodeLaunches, Decode(1, false, is_int8),
                 Decode(2, false, is_int8));
    ExpectAtMost(kDecodeLaunchesWithAdapters, Decode(1, true, is_int8),
                 Decode(2, true, is_int8));
  }
}

// The host takes no part in a decode step, and the step keeps no memory except
// its result.
TEST_F(DeviceLaunchesTest, DecodesAsAGraphCanRecord) {
  const auto record = [](const Decoder& decoder) {
    const model_config::ModelConfig& config = decoder.config();
    const StepValues values =
        MakeValues(config, 3, true, MakeRouting(config, kSequences - 1));
    RecordedStep step(decoder, values);
    step.Put(values);
    // Runs once, as before a recording, so that everything lazy is initialised.
    static_cast<void>(step.Run());
    const int64_t before = NumLiveAllocations();
    const OpObserver observer;
    const DeviceRecording recording;
    const at::Tensor x_TH = step.Run();
    EXPECT_EQ(NumLiveAllocations(), before + 1);
    EXPECT_THAT(observer.HostReads(), ::testing::IsEmpty());
    EXPECT_THAT(recording.events().uploads, ::testing::IsEmpty());
    return recording.events();
  };
  for (const bool is_int8 : {false, true}) {
    ExpectAtMost(kDecodeLaunchesWithAdapters, record(MakeDecoder(1, is_int8)),
                 record(MakeDecoder(2, is_int8)));
  }
  EXPECT_THAT(record(MakeHybrid()).waits, ::testing::IsEmpty());
  EXPECT_THAT(record(MakeHybridExperts(4)).waits, ::testing::IsEmpty());
}

// A recorded step gives the same bits as a pass whose routing the host knows.
// Earlier values of the step's inputs do not matter.
TEST_F(DeviceLaunchesTest, DecodesOtherValuesAtTheSamePlaces) {
  ExpectSameAtFixedPlaces(MakeDecoder(2));
  ExpectSameAtFixedPlaces(MakeDecoder(2, /*is_int8=*/true));
  ExpectSameAtFixedPlaces(MakeHybrid());
  ExpectSameAtFixedPlaces(MakeHybridExperts(4));
}

// The launches of a decode step do not depend on the number of adapters, also
// in layers of experts with a shared one.
TEST_F(DeviceLaunchesTest, ManyAdaptersDecodeInTheLaunchesOfOne) {
  const DeviceEvents one = DecodeHybridExperts(4, 1);
  const DeviceEvents many = DecodeHybridExperts(4, kManyRows);
  const Counts more = Beyond(one.launches, many.launches);
  EXPECT_EQ(Sum(more), 0) << ListOf(more);
  EXPECT_THAT(many.waits, ::testing::IsEmpty());
}

// The host does not wait for a layer of experts, with and without adapters.
TEST_F(DeviceLaunchesTest, DecodesALayerOfExpertsInFew) {
  ExpectAtMost(kDecodeLaunchesOfExperts, DecodeHybridExperts(7, 0),
               DecodeHybridExperts(8, 0));
  ExpectAtMost(kDecodeLaunchesOfExperts + 13, DecodeHybridExperts(7, kManyRows),
               DecodeHybridExperts(8, kManyRows));
}

TEST_F(DeviceLaunchesTest, TrainsALayerInFew) {
  const Step one = Train(1, false), two = Train(2, false);
  ExpectAtMost(9, one.forward, two.forward);
  ExpectAtMost(16, one.backward, two.backward);
}

TEST_F(DeviceLaunchesTest, TrainsALayerWithAdaptersInFew) {
  const Step one = Train(1, true), two = Train(2, true);
  ExpectAtMost(17, one.forward, two.forward);
  ExpectAtMost(32, one.backward, two.backward);
}

// The launches of a layer of experts do not depend on the number of experts. In
// each layer, the host waits once, to learn which experts the tokens have.
TEST_F(DeviceLaunchesTest, TrainsALayerOfExpertsInFew) {
  for (const int num_experts : {4, 12}) {
    SCOPED_TRACE(num_experts);
    const Step one = TrainExperts(1, num_experts);
    const Step two = TrainExperts(2, num_experts);
    const Counts forward = Beyond(one.forward.launches, two.forward.launches);
    const Counts backward =
        Beyond(one.backward.launches, two.backward.launches);
    EXPECT_LE(Sum(forward), 37) << ListOf(forward);
    EXPECT_LE(Sum(backward), 51) << ListOf(backward);
    EXPECT_EQ(two.forward.waits.size(), 2);
    EXPECT_THAT(two.backward.waits, ::testing::IsEmpty());
  }
}

}  // namespace
}  // namespace weft::testing
