// How many kernels a layer launches on a CUDA device, on the device of
// tests/support/host_device: what two layers launch beyond one. A failing
// test prints them by name.
#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "src/model/decoder.h"
#include "tests/model/device_decoder.h"
#include "tests/support/host_device/host_device.h"

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
// Segments of more than 16 rows: those of fewer take kernels of their own.
constexpr int64_t kTrainRows = 40;

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

// What the second list has beyond the first.
Counts Beyond(const std::vector<std::string>& fewer,
              const std::vector<std::string>& more) {
  Counts counts = CountsOf(more);
  for (const std::string& name : fewer) --counts[name];
  return counts;
}

class DeviceLaunchesTest : public ::testing::Test {
 protected:
  DeviceLaunchesTest() { at::set_num_threads(1); }

  static Decoder MakeDecoder(int num_layers) {
    at::manual_seed(3);
    const model::ModelConfig config = WideConfig(num_layers);
    return {config,
            WeightsTo(TinyWeights(config, at::kBFloat16), kBf16OnDevice),
            config.max_positions};
  }

  // Rows of two adapters of other ranks and, between them, of none.
  static lora::LoraRouting MakeRouting(const model::ModelConfig& config,
                                       int64_t rows) {
    const auto version = [&](int rank) {
      return TinyVersion(config, {.rank = rank, .alpha = 8}, at::kBFloat16);
    };
    return {{.begin = 0, .end = rows / 2, .version = version(8)},
            {.begin = rows / 2 + 1, .end = rows, .version = version(16)}};
  }

  static DeviceEvents Decode(int num_layers, bool with_adapters) {
    const Decoder decoder = MakeDecoder(num_layers);
    const model::ModelConfig& config = decoder.config();
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

  struct Step {
    DeviceEvents forward;
    DeviceEvents backward;
  };
  static Step Train(int num_layers, bool with_adapters) {
    const Decoder decoder = MakeDecoder(num_layers);
    PackedBatch batch{
        .tokens_T = at::arange(kTrainRows),
        .positions_T = at::cat({at::arange(10), at::arange(30)}).to(at::kInt),
        .nodes = {{0, 10, -1, 10}, {10, kTrainRows, -1, kTrainRows}}};
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
    const DeviceRecording recording;
    decoder.BackwardLayers(batch, tape, at::ones_like(x_TH));
    step.backward = recording.events();
    return step;
  }

  static void ExpectAtMost(int limit, const DeviceEvents& one_layer,
                           const DeviceEvents& two_layers) {
    const Counts counts = Beyond(one_layer.launches, two_layers.launches);
    EXPECT_LE(Sum(counts), limit) << ListOf(counts);
    // Layers read nothing back.
    EXPECT_THAT(two_layers.waits, ::testing::IsEmpty());
  }

  const c10::InferenceMode no_autograd_;
};

// With adapters the aim of decoding is 11.

TEST_F(DeviceLaunchesTest, DecodesALayerInFew) {
  ExpectAtMost(9, Decode(1, false), Decode(2, false));
}

TEST_F(DeviceLaunchesTest, DecodesALayerWithAdaptersInFew) {
  ExpectAtMost(17, Decode(1, true), Decode(2, true));
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

}  // namespace
}  // namespace weft::testing
