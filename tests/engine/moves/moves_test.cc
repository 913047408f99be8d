// Moves adapters between two engines in one process, whose logs are in a
// folder, and ends the engines at each point of a move.
#include "src/engine/moves/moves.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <filesystem>
#include <future>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "src/base/reason.h"
#include "tests/engine/engine_fixture.h"
#include "tests/support/failpoints.h"
#include "tests/support/status_matchers.h"

namespace weft::engine {
namespace {

using ::testing::ElementsAre;
using ::weft::testing::Wait;
using enum absl::StatusCode;

constexpr std::chrono::milliseconds kPoll(5);
constexpr std::chrono::seconds kPatience(60);

std::string ReasonOf(const absl::Status& status) {
  const std::optional<Reason> reason = FindReason(status);
  return reason ? reason->name : "";
}

void WaitUntil(const std::function<bool()>& holds) {
  const auto limit = std::chrono::steady_clock::now() + kPatience;
  while (!holds()) {
    ASSERT_LT(std::chrono::steady_clock::now(), limit);
    std::this_thread::sleep_for(kPoll);
  }
}

// An owner of one log, which goes on with it after a restart.
class Server {
 public:
  Server(std::filesystem::path folder, const std::string& name,
         EngineOptions options = {})
      : options_(std::move(options)) {
    options_.model_dir = folder / "model";
    options_.device = Device::kCpu;
    options_.dtype = Dtype::kF32;
    options_.num_threads = 1;
    options_.checkpoint_dir = folder / name;
    options_.kv_cache_bytes = 1 << 20;
    options_.state = absl::StrCat("file://", (folder / "store").string());
    options_.logs = 2;
    options_.instance = name;
    options_.advertise_address = absl::StrCat(name, ":1");
    Start();
  }

  void Start() {
    registry_ = std::make_unique<prometheus::Registry>();
    engine_ =
        StartEngine(options_, World(), registry_.get(), [](const std::string&) {
        }).value();
  }
  // Ends the engine as a crash does: nothing more is written, but the log is
  // free at once.
  void Kill() { engine_.reset(); }
  void Restart() {
    Kill();
    Start();
  }
  void Restart(EngineOptions more) {
    options_.max_adapters = more.max_adapters;
    Restart();
  }

  std::future<absl::Status> BeginMove(const std::string& id, int log) {
    const auto promise = std::make_shared<std::promise<absl::Status>>();
    engine_->MoveAdapter({.adapter_id = id, .log = log},
                         [promise](const absl::StatusOr<bool>& moved) {
                           promise->set_value(moved.status());
                         });
    return promise->get_future();
  }
  absl::Status Move(const std::string& id, int log) {
    return BeginMove(id, log).get();
  }

  absl::Status Put(const std::string& name, const std::string& value) {
    std::promise<absl::Status> promise;
    engine_->PutNote(name, value, [&promise](const absl::Status& put) {
      promise.set_value(put);
    });
    return promise.get_future().get();
  }
  // Returns the address of the other log's owner that has the unit.
  std::string Owner(const std::string& unit, int home) {
    return Wait<std::string>(
               [&](auto done) { engine_->FindOwner(unit, home, done); })
        .value_or("");
  }
  absl::StatusOr<AdapterInfo> Create(
      const std::string& id, Durability durability = Durability::kDefault) {
    return Wait<AdapterInfo>([&](auto done) {
      engine_->CreateAdapter({.adapter_id = id,
                              .config = {.rank = 2, .alpha = 4, .seed = 5},
                              .durability = durability},
                             done);
    });
  }
  absl::StatusOr<AdapterInfo> Info(const std::string& id) {
    return Wait<AdapterInfo>([&](auto done) { engine_->GetAdapter(id, done); });
  }
  absl::StatusOr<StepReply<TrainResult>> Train(const std::string& id,
                                               uint64_t step) {
    TrainRequest request{.adapter_id = id, .step = step};
    Datum datum;
    for (int32_t i = 0; i < 8; ++i) {
      datum.tokens.push_back(static_cast<int32_t>(step + i) % 40);
      datum.targets.push_back(static_cast<int32_t>(step + i + 1) % 40);
    }
    request.data = {datum};
    return Wait<StepReply<TrainResult>>(
        [&](auto done) { engine_->Train(request, done); });
  }
  absl::Status Optim(const std::string& id, uint64_t step) {
    return Wait<StepReply<OptimStepResult>>([&](auto done) {
             engine_->OptimStep({.adapter_id = id,
                                 .step = step,
                                 .adamw = {.learning_rate = 1e-2}},
                                done);
           })
        .status();
  }
  // Steps 2n+1 and 2n+2.
  absl::Status Learn(const std::string& id, uint64_t round) {
    const absl::Status trained = Train(id, 2 * round + 1).status();
    return trained.ok() ? Optim(id, 2 * round + 2) : trained;
  }
  absl::Status Publish(const std::string& id, const std::string& name,
                       uint64_t step) {
    return Wait<StepReply<PublishedSnapshot>>([&](auto done) {
             engine_->PublishSnapshot(
                 {.adapter_id = id, .name = name, .step = step}, done);
           })
        .status();
  }
  std::string Exported(const std::string& id,
                       const std::string& snapshot = "") {
    return Wait<PeftFiles>([&](auto done) {
             engine_->ExportAdapter({.adapter_id = id, .snapshot = snapshot},
                                    done);
           })
        .value()
        .at(1)
        .second;
  }

  Engine& engine() { return *engine_; }

 private:
  EngineOptions options_;
  std::unique_ptr<prometheus::Registry> registry_;
  std::unique_ptr<Engine> engine_;
};

class MovesTest : public ::testing::Test {
 protected:
  // Makes an adapter of log 0 that has learned one round.
  void MakeAdapter() {
    ASSERT_THAT(zero_.Create("x"), IsOk());
    ASSERT_THAT(zero_.Learn("x", 0), IsOk());
  }
  // Returns the weights after as many rounds without any move.
  std::string Undisturbed(uint64_t rounds) {
    const std::string id = absl::StrCat("undisturbed-", rounds);
    EXPECT_THAT(zero_.Create(id), IsOk());
    for (uint64_t round = 0; round < rounds; ++round) {
      EXPECT_THAT(zero_.Learn(id, round), IsOk());
    }
    return zero_.Exported(id);
  }
  // Trains one round where the adapter is, when it is anywhere.
  void LearnAnywhere(uint64_t round) {
    absl::Status ends[2];
    WaitUntil([&] {
      ends[0] = zero_.Learn("x", round);
      ends[1] = one_.Learn("x", round);
      return ends[0].ok() || ends[1].ok();
    });
    EXPECT_NE(ends[0].ok(), ends[1].ok()) << "both have it";
  }
  Server& owner() { return zero_.Info("x").ok() ? zero_ : one_; }

  bool HasMessage(int log) const {
    return std::filesystem::exists(folder_ / "store" / "arrivals" /
                                   absl::StrCat(log));
  }

  const TempFolder temporary_;
  const std::filesystem::path folder_ = temporary_.path();
  const int written_ = (weft::testing::WriteModel(folder_ / "model"), 0);
  Server zero_{folder_, "zero"};
  Server one_{folder_, "one"};
};

TEST_F(MovesTest, AnAdapterGoesOnInTheOtherLog) {
  MakeAdapter();
  ASSERT_THAT(zero_.Publish("x", "s", 3), IsOk());
  const std::string published = zero_.Exported("x", "s");
  const AdapterInfo before = zero_.Info("x").value();
  const auto trained = zero_.Train("x", 4);
  ASSERT_THAT(trained, IsOk());

  ASSERT_THAT(zero_.Move("x", 1), IsOk());
  // The receiver may yet have to see what the sender has seen.
  WaitUntil([this] { return one_.Info("x").ok(); });
  EXPECT_EQ(ReasonOf(zero_.Info("x").status()), "MOVED");
  const AdapterInfo after = one_.Info("x").value();
  EXPECT_EQ(after.epoch, before.epoch);
  EXPECT_EQ(after.next_step, 5);
  EXPECT_EQ(after.last_step, 4);
  EXPECT_EQ(after.optim_steps, 1);
  EXPECT_EQ(after.accumulated_tokens, 8);
  EXPECT_THAT(after.snapshots, ElementsAre("s"));
  EXPECT_EQ(one_.Exported("x", "s"), published);
  // A call whose answer was lost is repeated.
  const auto again = one_.Train("x", 4);
  ASSERT_THAT(again, IsOk());
  EXPECT_TRUE(again->replayed);
  EXPECT_EQ(again->result.data[0].logprobs, trained->result.data[0].logprobs);
  EXPECT_THAT(zero_.Move("x", 1), IsStatus(kFailedPrecondition, ""));
  EXPECT_THAT(one_.Move("x", 1), IsOk());
  WaitUntil([this] { return !HasMessage(1); });

  // Both start with what their logs say.
  ASSERT_THAT(one_.Optim("x", 5), IsOk());
  const std::string weights = one_.Exported("x");
  zero_.Restart();
  one_.Restart();
  WaitUntil([this] { return one_.Info("x").ok(); });
  EXPECT_EQ(ReasonOf(zero_.Info("x").status()), "MOVED");
  EXPECT_EQ(one_.Exported("x"), weights);
  EXPECT_EQ(one_.Exported("x", "s"), published);
}

TEST_F(MovesTest, ItGoesToAndFroAndLearnsAsWithoutMoves) {
  MakeAdapter();
  for (uint64_t round = 1; round < 5; ++round) {
    Server& from = round % 2 == 1 ? zero_ : one_;
    ASSERT_THAT(from.Move("x", static_cast<int>(round % 2)), IsOk());
    Server& now = round % 2 == 1 ? one_ : zero_;
    WaitUntil([&now] { return now.Info("x").ok(); });
    ASSERT_THAT(now.Learn("x", round), IsOk());
  }
  const std::string moved = zero_.Exported("x");
  EXPECT_EQ(moved, Undisturbed(5));
  zero_.Restart();
  one_.Restart();
  WaitUntil([this] { return zero_.Info("x").ok(); });
  EXPECT_EQ(zero_.Exported("x"), moved);
  // What left is no more than a name.
  WaitUntil([this] { return one_.engine().num_adapters() == 0; });
}

TEST_F(MovesTest, SnapshotsWaitForTheEndOfAMove) {
  MakeAdapter();
  SetFailpoints("moves.copy=err(EIO)");
  std::future<absl::Status> moved = zero_.BeginMove("x", 1);
  WaitUntil([] { return FailpointHits("moves.copy") > 0; });
  std::promise<absl::Status> promise;
  std::future<absl::Status> written = promise.get_future();
  zero_.engine().WriteSnapshot([&](const absl::StatusOr<bool>& done) {
    promise.set_value(done.status());
  });
  EXPECT_EQ(written.wait_for(std::chrono::seconds(1)),
            std::future_status::timeout);
  SetFailpoints("");
  EXPECT_THAT(moved.get(), IsOk());
  EXPECT_THAT(written.get(), IsOk());
}

TEST_F(MovesTest, CallsForAHeldAdapterAreRepeated) {
  MakeAdapter();
  ASSERT_THAT(zero_.Publish("x", "s", 3), IsOk());
  SetFailpoints("moves.copy=err(EIO)");
  std::future<absl::Status> moved = zero_.BeginMove("x", 1);
  WaitUntil([] { return FailpointHits("moves.copy") > 0; });
  Engine& engine = zero_.engine();
  std::vector<absl::Status> ends = {zero_.Train("x", 4).status(),
                                    zero_.Publish("x", "t", 4),
                                    zero_.Info("x").status()};
  ends.push_back(
      Wait<bool>([&](auto done) { engine.DeleteAdapter("x", done); }).status());
  ends.push_back(Wait<bool>([&](auto done) {
                   engine.ReleaseSnapshot({.adapter_id = "x", .name = "s"},
                                          done);
                 }).status());
  ends.push_back(Wait<PeftFiles>([&](auto done) {
                   engine.ExportAdapter({.adapter_id = "x"}, done);
                 }).status());
  ends.push_back(Wait<StepReply<CheckpointInfo>>([&](auto done) {
                   engine.SaveCheckpoint({.adapter_id = "x", .name = "c"},
                                         done);
                 }).status());
  ends.push_back(
      Wait<SampleResult>([&](auto done) {
        engine.Sample(
            {.adapter_id = "x", .prompt = {1}, .config = {.max_tokens = 1}}, {},
            done);
      }).status());
  ends.push_back(zero_.Create("x").status());
  for (const absl::Status& end : ends) {
    EXPECT_EQ(ReasonOf(end), "ADAPTER_RECOVERING") << end;
  }
  // A second caller waits for the same move, and others train.
  std::future<absl::Status> joined = zero_.BeginMove("x", 1);
  ASSERT_THAT(zero_.Create("y"), IsOk());
  ASSERT_THAT(zero_.Learn("y", 0), IsOk());
  SetFailpoints("");
  EXPECT_THAT(moved.get(), IsOk());
  EXPECT_THAT(joined.get(), IsOk());
  EXPECT_THAT(one_.Info("x")->snapshots, ElementsAre("s"));
}

// The sender does not see the entry before it is gone.
class DeletedThereTest : public MovesTest {
 protected:
  void MoveAndDelete(const std::function<void()>& between) {
    MakeAdapter();
    ASSERT_THAT(one_.Create("another"), IsOk());
    SetFailpoints("moves.judge=err(EIO)");
    moved_ = zero_.BeginMove("x", 1);
    WaitUntil([this] { return one_.Info("x").ok(); });
    between();
    ASSERT_THAT(
        Wait<bool>([&](auto done) { one_.engine().DeleteAdapter("x", done); }),
        IsOk());
    const std::filesystem::path entry = folder_ / "store" / "adapters" / "x";
    WaitUntil([&] { return !std::filesystem::exists(entry); });
    SetFailpoints("");
  }

  std::future<absl::Status> moved_;
};

TEST_F(DeletedThereTest, ItDoesNotComeBack) {
  MoveAndDelete([] {});
  EXPECT_THAT(moved_.get(), IsOk());
  EXPECT_THAT(zero_.Info("x"), IsStatus(kNotFound, ""));
  EXPECT_THAT(zero_.Create("x"), IsOk());
}

TEST_F(DeletedThereTest, ItDoesNotComeBackWithTheNextProcess) {
  MoveAndDelete([this] { zero_.Kill(); });
  zero_.Start();
  WaitUntil([this] { return absl::IsNotFound(zero_.Info("x").status()); });
}

TEST_F(MovesTest, WhatCannotMoveIsRefused) {
  MakeAdapter();
  EXPECT_THAT(zero_.Move("none", 1), IsStatus(kNotFound, "none"));
  EXPECT_THAT(zero_.Move("", 1), IsStatus(kInvalidArgument, "adapter_id"));
  EXPECT_THAT(zero_.Move("x", 2), IsStatus(kInvalidArgument, "log: 2"));
  EXPECT_THAT(zero_.Move("x", -1), IsStatus(kInvalidArgument, "log: -1"));
  EXPECT_THAT(zero_.Move("x", 0), IsOk());
  ASSERT_THAT(zero_.Create("m", Durability::kMemory), IsOk());
  EXPECT_THAT(zero_.Move("m", 1), IsStatus(kFailedPrecondition, "memory"));
  one_.Kill();
  EXPECT_THAT(zero_.Move("x", 1), IsStatus(kUnavailable, "no server"));
  EXPECT_THAT(zero_.Learn("x", 1), IsOk());
}

// The message, the record and the entry of each point, and who ends there.
struct Point {
  const char* name;
  const char* failpoint;
  bool kills_zero;
  bool kills_one;
  int log;  // Where the adapter must be; -1: any.
  // The failure lasts until the sender serves the adapter again.
  bool lasts = false;
};

class KilledMoveTest : public MovesTest,
                       public ::testing::WithParamInterface<Point> {};

TEST_P(KilledMoveTest, LosesNothingAndDoublesNothing) {
  const Point& point = GetParam();
  MakeAdapter();
  SetFailpoints(absl::StrCat(point.failpoint, "=err(EIO)"));
  std::future<absl::Status> moved = zero_.BeginMove("x", 1);
  WaitUntil([&] { return FailpointHits(point.failpoint) > 0; });
  // The other side gets as far as it can.
  std::this_thread::sleep_for(std::chrono::milliseconds(500));
  if (point.kills_zero) zero_.Kill();
  if (point.kills_one) one_.Kill();
  if (!point.lasts) SetFailpoints("");
  if (point.kills_zero) zero_.Start();
  if (point.kills_one) one_.Start();
  if (point.lasts) WaitUntil([this] { return zero_.Info("x").ok(); });
  SetFailpoints("");
  const absl::Status end = moved.get();
  LearnAnywhere(1);
  Server& now = owner();
  if (point.log >= 0) {
    EXPECT_EQ(&now, point.log == 0 ? &zero_ : &one_) << end;
  }
  const std::string weights = now.Exported("x");
  EXPECT_EQ(weights, Undisturbed(2));
  // Neither log has anything left of the move.
  WaitUntil([this] { return !HasMessage(1); });
  zero_.Restart();
  one_.Restart();
  LearnAnywhere(2);
  EXPECT_EQ(owner().Exported("x"), Undisturbed(3));
  // It can move from wherever it is.
  ASSERT_THAT(owner().Move("x", &owner() == &zero_ ? 1 : 0), IsOk());
  LearnAnywhere(3);
  EXPECT_EQ(owner().Exported("x"), Undisturbed(4));
}

INSTANTIATE_TEST_SUITE_P(
    Moves, KilledMoveTest,
    ::testing::Values(
        // `leaving` is recorded, and nobody else knows.
        Point{"UnsentSenderEnds", "moves.send", true, false, 0},
        Point{"UnsentBothEnd", "moves.send", true, true, 0},
        // The message is sent, and no image is copied.
        Point{"SentSenderEnds", "moves.copy", true, false, -1},
        Point{"SentSenderIsBack", "moves.copy", true, false, 0, true},
        Point{"SentReceiverEnds", "moves.copy", false, true, 1},
        Point{"SentBothEnd", "moves.copy", true, true, -1},
        // `arriving` is recorded, and the entry is the sender's.
        Point{"ArrivingSenderEnds", "moves.take", true, false, -1},
        Point{"ArrivingSenderIsBack", "moves.take", true, false, 0, true},
        Point{"ArrivingBothAreBack", "moves.take", true, true, 0, true},
        Point{"ArrivingReceiverEnds", "moves.take", false, true, 1},
        Point{"ArrivingBothEnd", "moves.take", true, true, -1},
        // The entry is the receiver's, which does not know.
        Point{"TakenSenderEnds", "moves.taken", true, false, 1},
        Point{"TakenReceiverEnds", "moves.taken", false, true, 1},
        Point{"TakenBothEnd", "moves.taken", true, true, 1},
        // The receiver serves, and the sender does not know.
        Point{"OwnSenderEnds", "moves.judge", true, false, 1},
        Point{"OwnReceiverEnds", "moves.judge", false, true, 1},
        Point{"OwnBothEnd", "moves.judge", true, true, 1}),
    [](const auto& instance) { return instance.param.name; });

// The sender learns of both at once, or the next owner of its log does.
TEST_F(MovesTest, WhatTheReceiverDeletesStaysDeleted) {
  for (const bool restarts : {false, true}) {
    MakeAdapter();
    SetFailpoints("moves.judge=err(EIO)");
    std::future<absl::Status> moved = zero_.BeginMove("x", 1);
    WaitUntil([this] { return one_.Info("x").ok(); });
    ASSERT_THAT(
        Wait<bool>([&](auto done) { one_.engine().DeleteAdapter("x", done); }),
        IsOk());
    WaitUntil([this] {
      return !std::filesystem::exists(folder_ / "store" / "adapters" / "x");
    });
    if (restarts) zero_.Restart();
    SetFailpoints("");
    EXPECT_EQ(moved.get().ok(), !restarts);
    WaitUntil([this] { return absl::IsNotFound(zero_.Info("x").status()); });
    EXPECT_EQ(zero_.engine().num_adapters(), 0);
    EXPECT_THAT(one_.Info("x"), IsStatus(kNotFound, "x"));
  }
}

// A session of the Tinker API with two models.
class SessionMoveTest : public MovesTest {
 protected:
  static constexpr char kNote[] = "tinker/session/";

  // Makes the session in log 0, whose models have learned a different number of
  // rounds.
  void MakeSession() {
    for (const std::string& model : models_) {
      ASSERT_THAT(zero_.Create(model), IsOk());
      ASSERT_THAT(zero_.Learn(model, 0), IsOk());
    }
    ASSERT_THAT(zero_.Learn(models_[1], 1), IsOk());
    ASSERT_THAT(zero_.Put(kNote + session_, "s"), IsOk());
    ASSERT_THAT(zero_.Put("tinker/model/" + session_ + ":train:0", "m"),
                IsOk());
    ASSERT_THAT(zero_.Put("tinker/usage/" + session_, "u"), IsOk());
  }
  // Returns the names and values of a server's notes of the session.
  std::string NotesOf(Server& server) const {
    std::string text;
    for (const auto& [name, value] : server.engine().NotesWith("tinker/")) {
      absl::StrAppend(&text, name, "=", *value, " ");
    }
    return text;
  }
  std::string SessionNotes() const {
    return absl::StrCat("tinker/model/", session_, ":train:0=m tinker/session/",
                        session_, "=s ");
  }
  bool Has(Server& server, const std::string& id) {
    return server.Info(id).ok();
  }
  // Waits until one log has both models and the notes, and the other one has
  // nothing of them. Returns whether that is log 1.
  bool WaitUntilWhole() {
    bool at_one = false;
    WaitUntil([&] {
      at_one = Has(one_, models_[0]);
      return at_one || Has(zero_, models_[0]);
    });
    Server& has = at_one ? one_ : zero_;
    Server& has_not = at_one ? zero_ : one_;
    EXPECT_TRUE(Has(has, models_[1]));
    EXPECT_THAT(NotesOf(has), ::testing::StartsWith(SessionNotes()));
    // A sender that is back has to look first.
    WaitUntil(
        [&] { return !absl::StrContains(NotesOf(has_not), session_ + "=s"); });
    EXPECT_FALSE(Has(has_not, models_[0]));
    EXPECT_FALSE(Has(has_not, models_[1]));
    return at_one;
  }

  const std::string session_ = std::string(32, 'a');
  const std::vector<std::string> models_ = {session_ + ".train.0",
                                            session_ + ".train.1"};
};

TEST_F(SessionMoveTest, ItsModelsAndNotesGoTogether) {
  MakeSession();
  const auto trained = zero_.Train(models_[0], 3);
  ASSERT_THAT(trained, IsOk());
  // By the name of a model, there and back by that of the session.
  ASSERT_THAT(zero_.Move(models_[1], 1), IsOk());
  EXPECT_TRUE(WaitUntilWhole());
  for (const std::string& model : models_) {
    EXPECT_EQ(ReasonOf(zero_.Info(model).status()), "MOVED");
  }
  // What is no note of a session stays.
  EXPECT_EQ(NotesOf(zero_), absl::StrCat("tinker/usage/", session_, "=u "));
  const auto again = one_.Train(models_[0], 3);
  ASSERT_THAT(again, IsOk());
  EXPECT_TRUE(again->replayed);
  EXPECT_EQ(again->result.data[0].logprobs, trained->result.data[0].logprobs);
  ASSERT_THAT(one_.Optim(models_[0], 4), IsOk());
  // A model that is made now is of the same log.
  EXPECT_EQ(ReasonOf(zero_.Create(session_ + ".train.2").status()), "MOVED");
  zero_.Restart();
  one_.Restart();
  EXPECT_TRUE(WaitUntilWhole());
  const std::string weights = Undisturbed(2);
  EXPECT_EQ(one_.Exported(models_[0]), weights);
  EXPECT_EQ(one_.Exported(models_[1]), weights);
  ASSERT_THAT(one_.Move(session_, 0), IsOk());
  EXPECT_FALSE(WaitUntilWhole());
  EXPECT_EQ(zero_.Exported(models_[1]), weights);
  WaitUntil([this] { return one_.engine().num_adapters() == 0; });
  EXPECT_EQ(NotesOf(one_), "");
}

TEST_F(SessionMoveTest, OneWithoutModelsGoes) {
  ASSERT_THAT(zero_.Put(kNote + session_, "s"), IsOk());
  ASSERT_THAT(zero_.Move(session_, 1), IsOk());
  WaitUntil([this] { return NotesOf(one_) == kNote + session_ + "=s "; });
  EXPECT_EQ(NotesOf(zero_), "");
  EXPECT_EQ(zero_.Owner(session_, 0), "one:1");
  // Its first model is made there, and its end frees the name.
  EXPECT_EQ(ReasonOf(zero_.Create(models_[0]).status()), "MOVED");
  ASSERT_THAT(one_.Create(models_[0]), IsOk());
  ASSERT_THAT(Wait<bool>([&](auto done) {
                one_.engine().DeleteAdapter(models_[0], done);
              }),
              IsOk());
  const std::filesystem::path entry = folder_ / "store" / "adapters" / session_;
  EXPECT_EQ(ReasonOf(zero_.Create(models_[1]).status()), "MOVED");
  EXPECT_TRUE(std::filesystem::exists(entry)) << "the session has not ended";
  one_.engine().EraseNote(kNote + session_);
  WaitUntil([&entry] { return !std::filesystem::exists(entry); });
}

TEST_F(SessionMoveTest, ItsNotesDoNotChangeOnTheWay) {
  MakeSession();
  SetFailpoints("moves.copy=err(EIO)");
  std::future<absl::Status> moved = zero_.BeginMove(session_, 1);
  WaitUntil([] { return FailpointHits("moves.copy") > 0; });
  const std::string sampler = "tinker/sampler/" + session_ + ":sample:1";
  EXPECT_EQ(ReasonOf(zero_.Put(sampler, "x")), "ADAPTER_RECOVERING");
  EXPECT_EQ(ReasonOf(zero_.engine().CheckHeld(session_)), "ADAPTER_RECOVERING");
  zero_.engine().EraseNote(kNote + session_);
  EXPECT_EQ(ReasonOf(zero_.Create(session_ + ".train.2").status()),
            "ADAPTER_RECOVERING");
  // Those of other sessions do.
  EXPECT_THAT(zero_.Put(kNote + std::string(32, 'b'), "x"), IsOk());
  SetFailpoints("");
  ASSERT_THAT(moved.get(), IsOk());
  EXPECT_TRUE(WaitUntilWhole());
  WaitUntil([&] { return one_.Put(sampler, "x").ok(); });
  // What ends late at the other one leaves nothing there.
  EXPECT_EQ(ReasonOf(zero_.Put(sampler, "y")), "ADAPTER_RECOVERING");
  EXPECT_TRUE(zero_.engine().NotesWith("tinker/sampler/").empty());
}

TEST_F(SessionMoveTest, AReceiverWithoutRoomForAllRefusesAll) {
  one_.Restart({.max_adapters = 2});
  MakeSession();
  ASSERT_THAT(one_.Create("y"), IsOk());
  EXPECT_THAT(zero_.Move(session_, 1),
              IsStatus(kFailedPrecondition, "log 1 refuses the adapter"));
  EXPECT_FALSE(WaitUntilWhole());
  EXPECT_THAT(zero_.Learn(models_[0], 1), IsOk());
  EXPECT_THAT(zero_.Put(kNote + session_, "s"), IsOk());
  ASSERT_THAT(
      Wait<bool>([&](auto done) { one_.engine().DeleteAdapter("y", done); }),
      IsOk());
  EXPECT_THAT(zero_.Move(session_, 1), IsOk());
  EXPECT_TRUE(WaitUntilWhole());
}

// An accepted step that waits for an earlier one is not left behind.
TEST_F(SessionMoveTest, ItWaitsForStepsThatComeBeforeAcceptedOnes) {
  MakeSession();
  std::promise<void> kept;
  zero_.engine().Submit(OptimStepRequest{.adapter_id = models_[0],
                                         .step = 4,
                                         .adamw = {.learning_rate = 1e-2}},
                        {.note = "n", .kept = [&kept] { kept.set_value(); }},
                        [](const absl::StatusOr<StepResultPtr>&, bool) {});
  kept.get_future().get();
  std::future<absl::Status> moved = zero_.BeginMove(session_, 1);
  EXPECT_EQ(moved.wait_for(std::chrono::milliseconds(300)),
            std::future_status::timeout);
  ASSERT_THAT(zero_.Train(models_[0], 3), IsOk());
  EXPECT_THAT(moved.get(), IsOk());
  EXPECT_TRUE(WaitUntilWhole());
  EXPECT_EQ(one_.Exported(models_[0]), Undisturbed(2));
}

class KilledSessionMoveTest : public SessionMoveTest,
                              public ::testing::WithParamInterface<Point> {};

TEST_P(KilledSessionMoveTest, LeavesItWholeInOneLog) {
  const Point& point = GetParam();
  MakeSession();
  SetFailpoints(absl::StrCat(point.failpoint, "=err(EIO)"));
  std::future<absl::Status> moved = zero_.BeginMove(session_, 1);
  WaitUntil([&] { return FailpointHits(point.failpoint) > 0; });
  // The other side gets as far as it can.
  std::this_thread::sleep_for(std::chrono::milliseconds(500));
  if (point.kills_zero) zero_.Kill();
  if (point.kills_one) one_.Kill();
  if (!point.lasts) SetFailpoints("");
  if (point.kills_zero) zero_.Start();
  if (point.kills_one) one_.Start();
  if (point.lasts) WaitUntil([this] { return Has(zero_, models_[0]); });
  SetFailpoints("");
  moved.get().IgnoreError();
  const bool at_one = WaitUntilWhole();
  EXPECT_EQ(at_one, point.log == 1);
  WaitUntil([this] { return !HasMessage(1); });
  zero_.Restart();
  one_.Restart();
  EXPECT_EQ(WaitUntilWhole(), at_one);
  Server& has = at_one ? one_ : zero_;
  ASSERT_THAT(has.Learn(models_[0], 1), IsOk());
  const std::string weights = Undisturbed(2);
  EXPECT_EQ(has.Exported(models_[0]), weights);
  EXPECT_EQ(has.Exported(models_[1]), weights);
  ASSERT_THAT(has.Move(session_, at_one ? 0 : 1), IsOk());
  EXPECT_EQ(WaitUntilWhole(), !at_one);
}

INSTANTIATE_TEST_SUITE_P(
    Moves, KilledSessionMoveTest,
    ::testing::Values(
        Point{"UnsentSenderEnds", "moves.send", true, false, 0},
        Point{"SentSenderIsBack", "moves.copy", true, false, 0, true},
        Point{"SentReceiverEnds", "moves.copy", false, true, 1},
        Point{"ArrivingBothAreBack", "moves.take", true, true, 0, true},
        Point{"ArrivingReceiverEnds", "moves.take", false, true, 1},
        Point{"TakenSenderEnds", "moves.taken", true, false, 1},
        Point{"TakenReceiverEnds", "moves.taken", false, true, 1},
        Point{"TakenBothEnd", "moves.taken", true, true, 1},
        Point{"OwnSenderEnds", "moves.judge", true, false, 1},
        Point{"OwnBothEnd", "moves.judge", true, true, 1}),
    [](const auto& instance) { return instance.param.name; });

class FullReceiverTest : public ::testing::Test {};

TEST_F(FullReceiverTest, ItRefusesAndTheAdapterStays) {
  const TempFolder temporary;
  const std::filesystem::path folder = temporary.path();
  weft::testing::WriteModel(folder / "model");
  Server zero(folder, "zero");
  Server one(folder, "one", {.max_adapters = 1});
  ASSERT_THAT(zero.Create("x"), IsOk());
  ASSERT_THAT(one.Create("y"), IsOk());
  EXPECT_THAT(zero.Move("x", 1),
              IsStatus(kFailedPrecondition, "log 1 refuses the adapter"));
  EXPECT_THAT(zero.Learn("x", 0), IsOk());
  EXPECT_EQ(ReasonOf(one.Info("x").status()), "MOVED");
  // The refusal is in the way of no later move.
  ASSERT_THAT(
      Wait<bool>([&](auto done) { one.engine().DeleteAdapter("y", done); }),
      IsOk());
  EXPECT_THAT(zero.Move("x", 1), IsOk());
  WaitUntil([&one] { return one.Info("x").ok(); });
  EXPECT_THAT(one.Learn("x", 1), IsOk());
}

TEST(OneLogTest, HasNowhereToGo) {
  const TempFolder temporary;
  const std::filesystem::path folder = temporary.path();
  weft::testing::WriteModel(folder / "model");
  prometheus::Registry registry;
  const auto engine = StartEngine({.model_dir = folder / "model",
                                   .device = Device::kCpu,
                                   .dtype = Dtype::kF32,
                                   .num_threads = 1,
                                   .checkpoint_dir = folder / "checkpoints",
                                   .kv_cache_bytes = 1 << 20},
                                  World(), &registry, {})
                          .value();
  ASSERT_THAT(Wait<AdapterInfo>([&](auto done) {
                engine->CreateAdapter({.adapter_id = "x"}, done);
              }),
              IsOk());
  EXPECT_THAT(Wait<bool>([&](auto done) {
                engine->MoveAdapter({.adapter_id = "x", .log = 1}, done);
              }),
              IsStatus(kFailedPrecondition, "--logs"));
}

}  // namespace
}  // namespace weft::engine
