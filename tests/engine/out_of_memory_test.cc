// Tests the engine when its device runs out of memory or breaks. The device is
// the host, with an allocator that fails.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <filesystem>
#include <future>
#include <limits>
#include <memory>
#include <new>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "src/checkpoint/disk_checkpoints.h"
#include "src/engine/engine_impl.h"
#include "src/executor/remote_worker.h"
#include "tests/engine/engine_fixture.h"
#include "tests/model/tiny_model.h"
#include "tests/support/limited_memory.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temp_folder.h"

namespace weft::engine {
namespace {

using ::testing::Each;
using ::weft::testing::LimitedMemory;
using ::weft::testing::Wait;

constexpr int kLayers = 8;
constexpr int64_t kDatumTokens = 32;

// A fake device. The test sets the device's answers.
class ToldDevice final : public ComputeDevice {
 public:
  struct State {
    std::atomic<int> num_releases = 0;
    std::atomic<bool> lost = false;
    std::atomic<bool> fails_late = false;
    std::atomic<bool> is_cpu = false;
  };
  explicit ToldDevice(State* state) : state_(*state) {}
  DeviceMemory Memory() const override {
    if (state_.is_cpu) return {};
    return {.total = 300, .reserved = 200, .allocated = 100};
  }
  int64_t LimitTo(double /*share*/) override { return 0; }
  void Wait() override {
    TORCH_CHECK(!state_.fails_late, "a kernel has failed");
  }
  void ReleaseCached() override { ++state_.num_releases; }
  absl::Status CheckAnswers() override {
    if (!state_.lost) return absl::OkStatus();
    return absl::UnavailableError("CUDA device 0: an illegal address");
  }

 private:
  State& state_;
};

model::Decoder MakeDecoder(int num_layers) {
  at::set_num_threads(1);
  at::manual_seed(7);
  const model_config::ModelConfig config = TinyConfig(num_layers);
  return {config, TinyWeights(config, at::kFloat), config.max_positions};
}

class OutOfMemoryTest : public ::testing::Test {
 protected:
  void SetUp() override { Start(GradientCheckpointing::kAuto); }
  void TearDown() override { engine_.reset(); }

  // Starts a new engine with adapter "a", which has taken one step.
  void Start(GradientCheckpointing checkpointing) {
    memory_.SetLimit(LimitedMemory::kNoLimit);
    engine_.reset();
    registry_ = std::make_unique<prometheus::Registry>();
    EngineParts parts{
        .options = {.checkpoint_dir = folder_,
                    .max_adapters = 4,
                    .max_adapters_per_tenant = 4,
                    .max_resident_adapters = 4,
                    .max_batch_tokens = 2 * kDatumTokens,
                    .gradient_checkpointing = checkpointing,
                    .kv_cache_bytes = 1 << 16},
        .device = std::make_unique<ToldDevice>(&device_),
        .decoder = std::make_unique<model::Decoder>(MakeDecoder(kLayers)),
        .disks = std::make_unique<DiskMetrics>(registry_.get(),
                                               std::vector<WatchedFolder>()),
        .spill = std::make_unique<SpillFolder>(
            *SpillFolder::Open(folder_ / ".spill")),
        .checkpoints = std::make_unique<checkpoint::DiskCheckpoints>(folder_)};
    engine_ = std::make_unique<EngineImpl>(std::move(parts), registry_.get());
    ASSERT_THAT(Create("a"), IsOk());
    ASSERT_THAT(Train(1), IsOk());
    ASSERT_THAT(Optim(), IsOk());
  }

  absl::StatusOr<AdapterInfo> Create(const std::string& id) {
    return Wait<AdapterInfo>([&](auto done) {
      engine_->CreateAdapter(
          {.adapter_id = id, .config = {.rank = 4, .alpha = 4, .seed = 5}},
          done);
    });
  }

  static TrainRequest RequestOf(const std::string& id, int num_data,
                                int64_t num_tokens = kDatumTokens) {
    TrainRequest request{.adapter_id = id};
    for (int32_t d = 0; d < num_data; ++d) {
      Datum& datum = request.data.emplace_back();
      for (int32_t i = 0; i < num_tokens; ++i) {
        datum.tokens.push_back((11 * d + 3 * i) % 53);
        datum.targets.push_back((11 * d + 3 * i + 3) % 53);
      }
    }
    return request;
  }

  // Trains one request of `num_micro_batches` micro-batches, with two data
  // each.
  absl::StatusOr<TrainResult> Train(int num_micro_batches) {
    const auto reply = Wait<StepReply<TrainResult>>([&](auto done) {
      engine_->Train(RequestOf("a", 2 * num_micro_batches), done);
    });
    if (!reply.ok()) return reply.status();
    return reply->result;
  }

  // Sends the requests one after another, and returns how each ends.
  std::vector<absl::Status> TrainTogether(
      const std::vector<TrainRequest>& requests) {
    std::vector<std::promise<absl::Status>> ends(requests.size());
    for (size_t i = 0; i < requests.size(); ++i) {
      engine_->Train(requests[i], [&end = ends[i]](const auto& reply) {
        end.set_value(reply.status());
      });
    }
    std::vector<absl::Status> statuses;
    for (auto& end : ends) statuses.push_back(end.get_future().get());
    return statuses;
  }

  absl::StatusOr<double> Optim() {
    const auto reply = Wait<StepReply<OptimStepResult>>([&](auto done) {
      engine_->OptimStep({.adapter_id = "a", .adamw = {.learning_rate = 1e-2}},
                         done);
    });
    if (!reply.ok()) return reply.status();
    return reply->result.grad_norm;
  }

  absl::Status Sample() {
    return Wait<SampleResult>([&](auto done) {
             engine_->Sample(
                 {.prompt = {1, 2, 3},
                  .config = {.max_tokens = 4, .stop = {.ignore_eos = true}}},
                 /*on_delta=*/{}, done);
           })
        .status();
  }

  // Returns the peak memory of a request that keeps its layers.
  int64_t PeakOf(int64_t num_tokens) {
    Start(GradientCheckpointing::kOff);
    for (const char* id : {"b", "busy"}) EXPECT_THAT(Create(id), IsOk());
    static_cast<void>(memory_.TakePeak());
    EXPECT_THAT(TrainTogether({RequestOf("a", 1, num_tokens)})[0], IsOk());
    return memory_.TakePeak();
  }

  // Returns the peak memory of a request with two micro-batches.
  int64_t PeakOfTraining(GradientCheckpointing checkpointing) {
    Start(checkpointing);
    static_cast<void>(memory_.TakePeak());
    EXPECT_THAT(Train(2), IsOk());
    return memory_.TakePeak();
  }

  // Returns a memory limit that is too small for a step that keeps its layers,
  // but large enough for a step that recomputes them.
  int64_t ScarceBytes() {
    const int64_t kept = PeakOfTraining(GradientCheckpointing::kOff);
    const int64_t recomputed = PeakOfTraining(GradientCheckpointing::kAll);
    EXPECT_LT(recomputed, kept);
    return (kept + recomputed) / 2;
  }

  LimitedMemory memory_;
  ToldDevice::State device_;
  const TempFolder temporary_;
  const std::filesystem::path folder_ = temporary_.path();
  std::unique_ptr<prometheus::Registry> registry_;
  std::unique_ptr<EngineImpl> engine_;
};

TEST_F(OutOfMemoryTest, AStepIsTheSameWhenItHadToRecomputeAllLayers) {
  const absl::StatusOr<TrainResult> expected = Train(3);
  const double expected_norm = Optim().value();

  const int64_t scarce = ScarceBytes();
  Start(GradientCheckpointing::kAuto);
  memory_.SetLimit(scarce);
  // There are three micro-batches, and the later ones add to the gradient of
  // the first.
  const TrainResult result = Train(3).value();
  EXPECT_GE(device_.num_releases, 3);
  EXPECT_EQ(result.metrics, expected->metrics);
  ASSERT_EQ(result.data.size(), expected->data.size());
  for (size_t d = 0; d < result.data.size(); ++d) {
    EXPECT_EQ(result.data[d].logprobs, expected->data[d].logprobs);
  }
  EXPECT_THAT(Optim(), IsOkAndHolds(expected_norm));
}

TEST_F(OutOfMemoryTest, TheOperatorsOffIsNotOverruled) {
  const int64_t scarce = ScarceBytes();
  Start(GradientCheckpointing::kOff);
  memory_.SetLimit(scarce);
  EXPECT_THAT(Train(1), IsStatus(absl::StatusCode::kResourceExhausted,
                                 "ForwardBackward: out of device memory"));
}

// On a CPU, the trainer keeps no copy of the scratch gradients. So a second
// attempt would add to what the first attempt left in the scratch.
TEST_F(OutOfMemoryTest, OnACpuABatchRunsOnlyOnce) {
  device_.is_cpu = true;
  Start(GradientCheckpointing::kAuto);
  std::atomic<int> num_allocations = 0;
  memory_.SetHook([&] { ++num_allocations; });
  ASSERT_THAT(Train(2), IsOk());
  memory_.SetHook({});
  const double expected = Optim().value();

  Start(GradientCheckpointing::kAuto);
  // An allocation of the second micro-batch fails.
  constexpr int kPlaces = 8;
  for (int place = 0; place < kPlaces; ++place) {
    memory_.SetHook(
        [left = num_allocations * (kPlaces + place) / (2 * kPlaces)]() mutable {
          if (left-- == 0) throw std::bad_alloc();
        });
    EXPECT_THAT(Train(2), IsStatus(absl::StatusCode::kResourceExhausted,
                                   "ForwardBackward: out of memory"))
        << place;
  }
  memory_.SetHook({});
  EXPECT_THAT(Train(2), IsOk());
  EXPECT_THAT(Optim(), IsOkAndHolds(expected));
}

TEST_F(OutOfMemoryTest, OnlyARequestWithoutMemoryAloneFails) {
  const int64_t peaks[] = {PeakOf(kDatumTokens / 2), PeakOf(kDatumTokens),
                           PeakOf(2 * kDatumTokens)};
  const auto together = [&](int64_t tokens) {
    // The first request runs while the other two arrive, which are packed.
    return TrainTogether({RequestOf("busy", 1, kDatumTokens / 2),
                          RequestOf("a", 1, kDatumTokens / 2),
                          RequestOf("b", 1, tokens)});
  };
  Start(GradientCheckpointing::kOff);
  for (const char* id : {"b", "busy"}) ASSERT_THAT(Create(id), IsOk());
  const int before = device_.num_releases;
  memory_.SetLimit((peaks[0] + peaks[1]) / 2);
  for (int round = 0; round < 5; ++round) {
    const std::vector<absl::Status> ends = together(kDatumTokens);
    EXPECT_THAT(ends[0], IsOk());
    EXPECT_THAT(ends[1], IsOk());
    EXPECT_THAT(ends[2], IsStatus(absl::StatusCode::kResourceExhausted, ""));
  }
  EXPECT_GT(device_.num_releases, before + 5) << "none was packed";
  memory_.SetLimit((peaks[1] + peaks[2]) / 2);
  for (int round = 0; round < 5; ++round) {
    EXPECT_THAT(together(kDatumTokens), Each(IsOk()));
  }
}

// Memory runs out once, at each place of three micro-batches. The second has
// the rest of one request and another request.
TEST_F(OutOfMemoryTest, WhatRanInPartsIsAsIfItHadRunAtOnce) {
  device_.is_cpu = true;
  Start(GradientCheckpointing::kOff);
  for (const char* id : {"b", "busy"}) ASSERT_THAT(Create(id), IsOk());
  const auto run = [&](int place) {
    std::atomic<int> left = place;
    memory_.SetHook([&] {
      if (left-- == 0) throw std::bad_alloc();
    });
    std::vector<absl::Status> ends = TrainTogether(
        {RequestOf("busy", 2), RequestOf("a", 3), RequestOf("b", 1)});
    memory_.SetHook({});
    return std::pair(std::move(ends), place - left);
  };
  const auto [whole, num_allocations] = run(std::numeric_limits<int>::max());
  ASSERT_THAT(whole, Each(IsOk()));
  const double expected = Optim().value();
  constexpr int kPlaces = 24;
  int num_divided = 0;
  for (int place = 0; place < kPlaces; ++place) {
    Start(GradientCheckpointing::kOff);
    for (const char* id : {"b", "busy"}) ASSERT_THAT(Create(id), IsOk());
    const auto [ends, allocations] = run(num_allocations * place / kPlaces);
    EXPECT_LE(std::ranges::count_if(
                  ends, [](const absl::Status& end) { return !end.ok(); }),
              1);
    num_divided += std::ranges::all_of(
        ends, [](const absl::Status& end) { return end.ok(); });
    if (!ends[1].ok()) continue;
    // Other parts are packed together, so sums have another order.
    EXPECT_NEAR(*Optim(), expected, 1e-4) << place;
  }
  EXPECT_GT(num_divided, 0);
}

TEST_F(OutOfMemoryTest, AStepWithoutMemoryLeavesTheAdapterAsItWas) {
  ASSERT_THAT(Train(1), IsOk());
  const absl::StatusOr<double> expected = Optim();
  const int64_t recomputed = PeakOfTraining(GradientCheckpointing::kAll);

  Start(GradientCheckpointing::kAuto);
  ASSERT_THAT(Train(1), IsOk());
  const int64_t used = memory_.used();
  // The second attempt fails at each of these places.
  constexpr int kPlaces = 8;
  for (int place = 0; place < kPlaces; ++place) {
    memory_.SetLimit(used + place * (recomputed - used) / kPlaces);
    EXPECT_THAT(Train(2), IsStatus(absl::StatusCode::kResourceExhausted, ""));
    memory_.SetLimit(LimitedMemory::kNoLimit);
    EXPECT_THAT(Sample(), IsOk());
  }
  EXPECT_GT(device_.num_releases, kPlaces);
  EXPECT_THAT(engine_->failure(), IsOk());
  // Nothing of the failed work stays in memory.
  EXPECT_LE(memory_.used(), used);
  EXPECT_THAT(Optim(), IsOkAndHolds(*expected));
}

TEST_F(OutOfMemoryTest, AnAdapterWithoutMemoryIsRefusedAlone) {
  memory_.SetLimit(memory_.used());
  EXPECT_THAT(Create("b"), IsStatus(absl::StatusCode::kResourceExhausted,
                                    "CreateAdapter: out of device memory"));
  EXPECT_EQ(device_.num_releases, 1);
  memory_.SetLimit(LimitedMemory::kNoLimit);
  EXPECT_THAT(Create("b"), IsOk());
  EXPECT_THAT(Train(1), IsOk());
}

TEST_F(OutOfMemoryTest, AnErrorThatTheDeviceGetsOverIsThatRequestsAlone) {
  memory_.SetHook([] { TORCH_CHECK(false, "a launch with bad arguments"); });
  EXPECT_THAT(Train(1), IsStatus(absl::StatusCode::kInternal, "bad arguments"));
  memory_.SetHook({});
  EXPECT_THAT(engine_->failure(), IsOk());
  EXPECT_THAT(Train(1), IsOk());
}

TEST_F(OutOfMemoryTest, AnErrorThatShowsLateIsThatOfTheBatchThatMadeIt) {
  ASSERT_THAT(Train(1), IsOk());
  const absl::StatusOr<double> expected = Optim();
  Start(GradientCheckpointing::kAuto);
  device_.fails_late = true;
  EXPECT_THAT(Train(1), IsStatus(absl::StatusCode::kInternal, "has failed"));
  device_.fails_late = false;
  // The failed batch added nothing to the gradient.
  EXPECT_THAT(Train(1), IsOk());
  EXPECT_THAT(Optim(), IsOkAndHolds(*expected));
}

TEST_F(OutOfMemoryTest, AfterTheDeviceIsLostNothingIsComputed) {
  device_.lost = true;
  EXPECT_THAT(Train(1), IsOk());  // The device is queried only after an error.
  memory_.SetHook([] { TORCH_CHECK(false, "an illegal address"); });
  EXPECT_THAT(Train(1), IsStatus(absl::StatusCode::kUnavailable,
                                 "the server has lost its device"));
  memory_.SetHook({});
  EXPECT_THAT(engine_->failure(),
              IsStatus(absl::StatusCode::kUnavailable, "lost its device"));
  EXPECT_THAT(Train(1), IsStatus(absl::StatusCode::kUnavailable, ""));
  EXPECT_THAT(Optim(), IsStatus(absl::StatusCode::kUnavailable, ""));
  EXPECT_THAT(Sample(), IsStatus(absl::StatusCode::kUnavailable, ""));
}

TEST_F(OutOfMemoryTest, ADeviceIsAlsoLostOutsideOfComputing) {
  device_.lost = true;
  memory_.SetHook([] { TORCH_CHECK(false, "an illegal address"); });
  EXPECT_THAT(Create("b"), IsStatus(absl::StatusCode::kUnavailable, ""));
  memory_.SetHook({});
  EXPECT_THAT(engine_->failure(),
              IsStatus(absl::StatusCode::kUnavailable, "lost its device"));
}

TEST_F(OutOfMemoryTest, TheDevicesMemoryIsOnTheMetricsPage) {
  for (const auto& [name, bytes] :
       {std::pair("weft_device_memory_bytes", 300.0),
        std::pair("weft_device_reserved_bytes", 200.0),
        std::pair("weft_device_allocated_bytes", 100.0)}) {
    EXPECT_EQ(AddGauge(registry_.get(), name, "").Value(), bytes) << name;
  }
}

// A micro-batch fails at its first allocation, then at its second, and so on,
// until it finds all the memory that it needs. This covers forward, scatter and
// backward.
TEST(TrainRunnerOutOfMemoryTest, KeepsNothingWhereverItEnds) {
  LimitedMemory memory;
  const at::InferenceMode no_autograd;
  const model::Decoder decoder = MakeDecoder(2);
  executor::Executor executor(decoder, {}, {});
  TrainRunner runner(&executor, TrainRunnerOptions());
  const TrainRequest request{
      .data = {{.tokens = {1, 2, 3}, .targets = {2, 3, 4}}}};
  const lora::AdapterVersionPtr version =
      TinyVersion(decoder.config(), {.rank = 2, .alpha = 2}, at::kFloat);
  const TrainPiece piece{
      .request = &request, .num_data = 1, .version = version};
  const lora::LoraGradients gradients =
      lora::ZeroGradients({version}, at::kCPU);
  const auto run = [&] { return runner.Run({piece}, &gradients, {{}}).ok(); };
  ASSERT_TRUE(run());  // Allocates what later runs use again.
  const int64_t used = memory.used();
  int num_failures = 0;
  for (bool done = false; !done; ++num_failures) {
    memory.SetHook([left = num_failures]() mutable {
      TORCH_CHECK_WITH(OutOfMemoryError, left-- > 0, "nothing left");
    });
    try {
      done = run();
    } catch (const c10::OutOfMemoryError&) {
    }
    memory.SetHook({});
    ASSERT_EQ(memory.used(), used) << "after " << num_failures;
  }
  EXPECT_GT(num_failures, 20);
}

// Four tokens of the base model, each of which scores one target.
executor::TrainPlan SmallPlan() {
  executor::TrainPlan plan;
  plan.batch.tokens_T = at::arange(4);
  plan.batch.positions_T = at::arange(4).to(at::kInt);
  plan.batch.nodes = {{.begin = 0, .end = 4, .subtree_end = 4}};
  plan.score_index_R = at::arange(4);
  plan.rows.row_offsets = {0, 1, 2, 3, 4};
  plan.rows.targets = {1, 2, 3, 4};
  plan.rows.temperatures = {1, 1, 1, 1};
  return plan;
}

TEST(GroupOutOfMemoryTest, ARankThatRunsOutEndsTheGroup) {
  static thread_local bool is_follower = false;
  std::atomic<bool> short_of_memory{false};
  LimitedMemory memory;
  memory.SetHook([&] {
    TORCH_CHECK_WITH(OutOfMemoryError, !(is_follower && short_of_memory),
                     "nothing left");
  });
  const auto meeting = parallel::Rendezvous::InProcess();
  const auto join = [&](int rank) {
    parallel::Links links = parallel::Meet(
        meeting, rank, {.tensor_size = 1, .num_replicas = 2}, /*local=*/true);
    parallel::JoinOn(at::kCPU, &links);
    return links;
  };
  std::thread other([&] {
    const at::InferenceMode no_autograd;
    parallel::Links links = join(1);
    const model::Decoder decoder = MakeDecoder(2);
    is_follower = true;
    EXPECT_THROW(executor::RemoteWorker(decoder, {}, &links).Run(),
                 c10::OutOfMemoryError);
  });
  parallel::Links links = join(0);
  const model::Decoder decoder = MakeDecoder(2);
  executor::Executor executor(decoder, {}, std::move(links));
  const at::InferenceMode no_autograd;
  const auto forward = [&] {
    std::vector<executor::TrainPlan> plans(2);
    for (executor::TrainPlan& plan : plans) plan = SmallPlan();
    return executor.Forward(std::move(plans));
  };
  EXPECT_EQ(forward().size(), 2);
  // Rank 1 now runs out of memory, while rank 0 waits for its scores.
  short_of_memory = true;
  EXPECT_THROW(static_cast<void>(forward()), std::exception);
  EXPECT_TRUE(executor.failed());
  other.join();
}

}  // namespace
}  // namespace weft::engine
