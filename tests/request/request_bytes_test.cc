// Compares what NumBytes says with the bytes that a copy of the request
// allocates. It may count half as much again for the smallest allocations.
#include "src/request/request_bytes.h"

#include <cstdlib>
#include <new>

#include "gtest/gtest.h"

namespace {

thread_local int64_t allocated = 0;
constexpr int64_t kHeaderBytes = 16;  // What the allocator adds on average.

}  // namespace

void* operator new(size_t size) {
  void* const memory = std::malloc(size);
  if (memory == nullptr) throw std::bad_alloc();
  allocated += static_cast<int64_t>(size) + kHeaderBytes;
  return memory;
}

void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t /*size*/) noexcept {
  std::free(memory);
}

namespace weft {
namespace {

template <typename Request>
void ExpectCounted(const Request& request) {
  const int64_t before = allocated;
  const Request copy = request;
  const int64_t taken =
      allocated - before + static_cast<int64_t>(sizeof(Request));
  EXPECT_GE(NumBytes(copy), taken);
  EXPECT_LE(NumBytes(copy), taken + taken / 2 + 8192);
}

constexpr size_t kMany = 100'000;

TEST(RequestBytesTest, EachPayloadOfTrainingCounts) {
  const auto with = [](auto fill) {
    TrainRequest request{.adapter_id = "alice~a", .step = 1};
    request.data.push_back({.tokens = {3}, .targets = {4}});
    fill(request, request.data[0]);
    ExpectCounted(request);
  };
  using Request = TrainRequest;
  with([](Request&, Datum& d) { d.tokens.resize(kMany); });
  with([](Request&, Datum& d) { d.targets.resize(64 * kMany); });
  with([](Request&, Datum& d) { d.weights.resize(kMany); });
  with([](Request&, Datum& d) { d.logprobs.resize(kMany); });
  with([](Request&, Datum& d) { d.advantages.resize(kMany); });
  with([](Request&, Datum& d) { d.target_offsets.resize(kMany); });
  with([](Request&, Datum& d) { d.routing.resize(kMany); });
  with([](Request&, Datum& d) { d.support.tokens.resize(kMany); });
  with([](Request&, Datum& d) { d.support.offsets.resize(kMany); });
  with([](Request&, Datum& d) { d.teacher_tokens.resize(kMany); });
  with([](Request&, Datum& d) {
    for (size_t i = 0; i < 1000; ++i) {
      CustomInput& input =
          d.custom_inputs["an input with a name" + std::to_string(i)];
      input.shape.resize(2);
      input.floats.resize(i);
      input.ints.resize(i);
    }
  });
  with([](Request& r, Datum&) {
    r.replay.spans.resize(1000);
    for (auto& spans : r.replay.spans) {
      spans.push_back({.sequence_id = std::string(40, 'r')});
    }
  });
  with([](Request& r, Datum&) {
    r.loss.custom.graph = std::string(kMany, 'g');
    r.loss.custom.inputs.resize(1000, {.name = std::string(40, 'n')});
  });
  with([](Request& r, Datum& d) { r.data.resize(10'000, d); });
}

TEST(RequestBytesTest, EachPayloadOfASampleCounts) {
  const auto with = [](auto fill) {
    SampleRequest request;
    fill(request);
    ExpectCounted(request);
  };
  using Request = SampleRequest;
  with([](Request& r) { r.prompt.resize(kMany); });
  with([](Request& r) { r.prompt_targets.resize(kMany); });
  with([](Request& r) { r.prompt_target_offsets.resize(kMany); });
  with([](Request& r) { r.config.logit_bias.resize(kMany); });
  with([](Request& r) { r.config.allowed_token_ids.resize(kMany); });
  with([](Request& r) { r.config.stop.token_ids.resize(kMany); });
  with([](Request& r) {
    r.config.stop.token_sequences.resize(1000, std::vector<int32_t>(8));
    r.config.stop.byte_strings.resize(1000, std::string(40, 's'));
  });
}

TEST(RequestBytesTest, EachOtherStepCounts) {
  ExpectCounted(OptimStepRequest{.adapter_id = std::string(200, 'a')});
  SaveCheckpointRequest save{.adapter_id = "a", .name = std::string(200, 'n')};
  for (int i = 0; i < 64; ++i) {
    save.metadata["an entry of some length " + std::to_string(i)] =
        std::string(200, 'v');
  }
  ExpectCounted(save);
  ExpectCounted(
      LoadCheckpointRequest{.source_adapter_id = std::string(200, 's')});
  ExpectCounted(PublishSnapshotRequest{.name = std::string(200, 'n')});
  ExpectCounted(RefusedStep{
      .digest = std::string(32, 'd'),
      .status = absl::InvalidArgumentError(std::string(1000, 'm'))});
}

}  // namespace
}  // namespace weft
