// Runs the scenarios in scenarios/, whose README.md describes their language.
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "gtest/gtest.h"
#include "tests/dispatch/fake_engine_thread.h"
#include "tests/support/scenarios.h"

namespace weft::dispatch {
namespace {

using Words = std::vector<std::string>;

int64_t Number(const std::string& word) {
  int64_t number = 0;
  EXPECT_TRUE(absl::SimpleAtoi(word, &number)) << word;
  return number;
}

// Returns the value of KEY=VALUE among the words, or `otherwise`.
std::string Option(const Words& words, const std::string& key,
                   const std::string& otherwise) {
  for (const std::string& word : words) {
    if (word.starts_with(key + "=")) return word.substr(key.size() + 1);
  }
  return otherwise;
}

class Interpreter {
 public:
  std::string Run(const Words& words) {
    if (words[0] == "options") return Start(words);
    if (engine_ == nullptr) Start({"options"});
    const auto handler = handlers_.find(words[0]);
    if (handler == handlers_.end()) return "unknown command " + words[0];
    return handler->second(words);
  }

 private:
  using Handler = std::function<std::string(const Words&)>;

  std::string Start(const Words& words) {
    Options options;
    options.scheduler.max_batch_tokens = Number(Option(words, "batch", "8192"));
    options.scheduler.queue.max_requests =
        Number(Option(words, "requests", "1024"));
    options.residency.max_resident =
        static_cast<int>(Number(Option(words, "slots", "8")));
    options.max_adapters =
        static_cast<int>(Number(Option(words, "adapters", "100")));
    options.max_adapters_per_tenant =
        static_cast<int>(Number(Option(words, "tenant_adapters", "100")));
    options.max_adapter_bytes_per_tenant =
        Number(Option(words, "tenant_bytes", "0"));
    options.max_stored_reply_bytes =
        Number(Option(words, "reply_bytes", "1000000"));
    engine_ = std::make_unique<FakeEngineThread>(options);
    return "";
  }

  Dispatcher& dispatcher() { return engine_->dispatcher(); }

  void Answer(const std::string& call, const std::string& text) {
    answers_.push_back(absl::StrCat(call, " ", text));
  }

  StepCallback StepAnswer(const std::string& call) {
    return [this, call](const absl::StatusOr<StepResultPtr>& result,
                        bool replayed) {
      if (!result.ok()) {
        Answer(call, absl::StatusCodeToString(result.status().code()));
        return;
      }
      std::string text = "loaded";
      if (const auto* made = std::get_if<OptimStepResult>(result->get())) {
        text = absl::StrCat("run ", made->version);
      } else if (const auto* failure =
                     std::get_if<StepFailure>(result->get())) {
        text = absl::StrCat("done with ",
                            absl::StatusCodeToString(failure->status.code()));
      }
      Answer(call, absl::StrCat(text, replayed ? " again" : ""));
    };
  }

  std::string Submit(const Words& words) {
    const std::string& call = words.at(1);
    const std::string adapter = words.at(2) == "base" ? "" : words.at(2);
    const auto step = static_cast<uint64_t>(Number(Option(words, "step", "0")));
    const int64_t payload = Number(Option(words, "payload", "0"));
    const std::string late = Option(words, "deadline", "");
    uint64_t epoch = 0;
    if (const std::string life = Option(words, "epoch", ""); !life.empty()) {
      epoch = dispatcher().adapters().Info(adapter)->epoch;
      if (life == "past") --epoch;
    }
    const absl::Time deadline =
        late.empty() ? absl::InfiniteFuture()
                     : engine_->clock().Now() + absl::Seconds(Number(late));
    StepRequest request;
    WorkItem item = {.kind = WorkKind::kAdapterOp, .tokens = 1};
    if (words[0] == "train" || words[0] == "score") {
      TrainRequest train =
          OneDatum(adapter, step, static_cast<int32_t>(payload));
      train.deadline = deadline;
      item = TrainItem();
      train.unnumbered = item.unnumbered = words[0] == "score";
      if (train.unnumbered) item.backward = false;
      train.data.resize(static_cast<size_t>(Number(Option(words, "data", "1"))),
                        train.data.front());
      item.datum_tokens.resize(train.data.size(), 10);
      if (const std::string teacher = Option(words, "teacher", "");
          !teacher.empty()) {
        const Words name = absl::StrSplit(teacher, ':');
        train.loss.function = LossFunction::kForwardKl;
        train.loss.teacher = {.adapter_id = name[0],
                              .snapshot = name.size() > 1 ? name[1] : ""};
      }
      request = train;
    } else if (words[0] == "optim") {
      item.kind = WorkKind::kOptim;
      request = OptimStepRequest{
          .adapter_id = adapter,
          .step = step,
          .epoch = epoch,
          .adamw = {.learning_rate = static_cast<double>(payload)},
          .deadline = deadline};
    } else if (words[0] == "invalid") {
      item.empty = true;
      request = RefusedStep{.adapter_id = adapter,
                            .step = step,
                            .deadline = deadline,
                            .digest = absl::StrCat("invalid ", payload),
                            .status = absl::InvalidArgumentError("")};
    } else {
      item.numbered = true;
      request = LoadCheckpointRequest{
          .adapter_id = adapter, .name = "n", .step = step, .epoch = epoch};
    }
    handles_[call] = dispatcher().steps().Submit(
        std::move(request), std::move(item), StepAnswer(call));
    return "";
  }

  std::string Sample(const Words& words) {
    SampleRequest request;
    request.adapter_id = words.at(2) == "base" ? "" : words.at(2);
    request.prompt = {1, 2};
    const std::string& call = words.at(1);
    handles_[call] = dispatcher().samples().Submit(
        std::move(request), nullptr,
        [this, call](const absl::StatusOr<SampleResult>& result) {
          Answer(call, absl::StatusCodeToString(result.status().code()));
        });
    return "";
  }

  std::string NameStep(const StepTask& step) {
    const std::string name =
        absl::StrCat(AdapterIdOf(*step.request), "/", step.step);
    running_[name] = step;
    return name;
  }

  std::string Next() {
    const std::optional<Work> work =
        engine_->Next(static_cast<int>(decoding_.size()));
    if (!work) return "stopped";
    if (std::holds_alternative<Idle>(*work)) return "idle";
    if (std::holds_alternative<RunDecode>(*work)) return "decode";
    if (const auto* move = std::get_if<RunMove>(&*work)) {
      moves_.push_back(move->move);
      constexpr const char* kPlaces[] = {"device", "host", "disk"};
      return absl::StrCat("move ",
                          dispatcher().adapters().NameOf(move->move.adapter),
                          " to ", kPlaces[static_cast<size_t>(move->move.to)]);
    }
    if (const auto* step = std::get_if<RunStep>(&*work)) {
      const StepRequest& request = *step->step.request;
      if (const auto* refused = std::get_if<RefusedStep>(&request)) {
        const std::string name =
            absl::StrCat("empty ", refused->adapter_id, "/", step->step.step);
        dispatcher().steps().Complete(step->step.id, refused->status);
        return name;
      }
      return "alone " + NameStep(step->step);
    }
    if (const auto* cancel = std::get_if<CancelSamples>(&*work)) {
      for (const uint64_t id : cancel->ids) {
        if (std::erase(decoding_, id) > 0) {
          dispatcher().samples().Finish(id, absl::CancelledError(""));
        }
      }
      return "cancel";
    }
    Words names;
    for (const auto& [slice, step] : std::get<RunTrain>(*work).slices) {
      names.push_back(NameStep(step));
    }
    return "train " + absl::StrJoin(names, " ");
  }

  std::string Complete(const Words& words, const absl::Status& status) {
    for (size_t i = 1; i < words.size(); ++i) {
      const StepTask step = running_.at(words[i]);
      running_.erase(words[i]);
      if (status.ok()) {
        dispatcher().steps().Complete(step.id,
                                      OptimStepResult{.version = ++runs_});
      } else {
        dispatcher().steps().Complete(step.id, status);
      }
    }
    return "";
  }

  std::string Loaded(const Words& words) {
    const auto last_step = static_cast<uint64_t>(Number(words.at(2)));
    dispatcher().steps().Complete(running_.at(words.at(1)).id,
                                  AdapterInfo{.last_step = last_step},
                                  AdapterFacts{.image_bytes = 10});
    running_.erase(words.at(1));
    return "";
  }

  std::string Moved(bool ok) {
    const Move move = moves_.front();
    moves_.erase(moves_.begin());
    engine_->Finish(move, ok ? absl::OkStatus()
                             : absl::ResourceExhaustedError("disk full"));
    return "";
  }

  std::string Take() {
    const std::optional<SampleTask> sample = dispatcher().samples().Take();
    if (!sample) return "none";
    taken_ = *sample;
    return sample->request->adapter_id.empty() ? "base"
                                               : sample->request->adapter_id;
  }

  std::string FinishSlice(const Words& words) {
    const StepTask step = running_.at(words.at(1));
    running_.erase(words.at(1));
    if (dispatcher().steps().FinishSlice(step.id)) return "more";
    dispatcher().steps().Complete(step.id, absl::CancelledError(""));
    return "ended";
  }

  std::string OnDevice(const Words& words) {
    const std::string name = words.at(1);
    const auto key = dispatcher().adapters().KeyOf(name);
    if (!key) return "unknown";
    dispatcher().adapters().WhenOnDevice(
        *key, [this, name](const absl::Status& room) {
          Answer(name, room.ok() ? "on device"
                                 : absl::StatusCodeToString(room.code()));
        });
    return "";
  }

  std::string Create(const Words& words) {
    const std::string name = words.at(1);
    engine_->Create(
        name, Option(words, "tenant", name),
        [this, name](const absl::StatusOr<AdapterKey>& key) {
          Answer(name, key.ok()
                           ? "created"
                           : absl::StatusCodeToString(key.status().code()));
        },
        static_cast<uint64_t>(Number(Option(words, "last", "0"))));
    return "";
  }

  std::string Remove(const Words& words) {
    const auto key = dispatcher().adapters().KeyOf(words.at(1));
    if (!key) return "unknown";
    return absl::StrCat(dispatcher().adapters().Remove(*key).size());
  }

  std::string Last(const Words& words) {
    const auto info = dispatcher().adapters().Info(words.at(1));
    return info.ok() ? absl::StrCat(info->last_step, " next ", info->next_step)
                     : absl::StatusCodeToString(info.status().code());
  }

  std::string Answers() {
    engine_->RunReplies();
    return absl::StrJoin(std::exchange(answers_, {}), ", ");
  }

  static std::string Nothing(const std::function<void()>& act) {
    act();
    return "";
  }

  std::unique_ptr<FakeEngineThread> engine_;
  std::map<std::string, CancelHandle> handles_;
  std::map<std::string, StepTask> running_;
  std::vector<uint64_t> decoding_;
  std::optional<SampleTask> taken_;
  std::vector<Move> moves_;
  std::shared_ptr<void> hold_;
  Words answers_;
  uint64_t runs_ = 0;
  const Handler submit_ = [this](const Words& w) { return Submit(w); };
  const std::map<std::string, Handler> handlers_ = {
      {"create", [this](const Words& w) { return Create(w); }},
      {"remove", [this](const Words& w) { return Remove(w); }},
      {"train", submit_},
      {"optim", submit_},
      {"load", submit_},
      {"score", submit_},
      {"invalid", submit_},
      {"sample", [this](const Words& w) { return Sample(w); }},
      {"cancel",
       [this](const Words& w) {
         return Nothing([&] { handles_.at(w.at(1)).Cancel(); });
       }},
      {"next", [this](const Words&) { return Next(); }},
      {"done",
       [this](const Words& w) { return Complete(w, absl::OkStatus()); }},
      {"fail",
       [this](const Words& w) {
         return Complete(w, absl::InternalError("failed"));
       }},
      {"lose",
       [this](const Words& w) {
         return Complete(w, absl::UnavailableError("the server stops"));
       }},
      {"refuse",
       [this](const Words& w) {
         return Complete(w, absl::FailedPreconditionError("not finite"));
       }},
      {"loaded", [this](const Words& w) { return Loaded(w); }},
      {"slice", [this](const Words& w) { return FinishSlice(w); }},
      {"ondevice", [this](const Words& w) { return OnDevice(w); }},
      {"moved", [this](const Words&) { return Moved(true); }},
      {"unmoved", [this](const Words&) { return Moved(false); }},
      {"take", [this](const Words&) { return Take(); }},
      {"putback",
       [this](const Words&) {
         return Nothing([&] { dispatcher().samples().PutBack(*taken_); });
       }},
      {"start",
       [this](const Words&) {
         return Nothing([&] {
           dispatcher().samples().Start(*taken_);
           decoding_.push_back(taken_->id);
         });
       }},
      {"finish",
       [this](const Words&) {
         return Nothing([&] {
           dispatcher().samples().Finish(decoding_.front(), SampleResult());
           decoding_.erase(decoding_.begin());
         });
       }},
      {"answers", [this](const Words&) { return Answers(); }},
      {"last", [this](const Words& w) { return Last(w); }},
      {"wait",
       [this](const Words& w) {
         return Nothing(
             [&] { engine_->clock().Advance(absl::Seconds(Number(w.at(1)))); });
       }},
      {"hold",
       [this](const Words&) {
         return Nothing([&] { hold_ = dispatcher().Hold(); });
       }},
      {"release",
       [this](const Words&) { return Nothing([&] { hold_.reset(); }); }},
      {"drain",
       [this](const Words&) {
         return Nothing([&] {
           dispatcher().Drain([this](const absl::StatusOr<bool>& done) {
             Answer("drain", absl::StatusCodeToString(done.status().code()));
           });
         });
       }},
      {"stop",
       [this](const Words&) {
         return Nothing([&] {
           dispatcher().Stop();
           dispatcher().Close(absl::UnavailableError("stopped"));
         });
       }},
  };
};

class DispatchScenarioTest : public ::testing::TestWithParam<std::string> {};

TEST_P(DispatchScenarioTest, AnswersAsWritten) {
  std::ifstream file(testing::ScenarioPath("dispatch", GetParam()));
  ASSERT_TRUE(file.good());
  Interpreter interpreter;
  std::string line;
  for (int number = 1; std::getline(file, line); ++number) {
    const std::string text(absl::StripAsciiWhitespace(
        std::vector<std::string>(absl::StrSplit(line, '#'))[0]));
    if (text.empty()) continue;
    const std::vector<std::string> sides = absl::StrSplit(text, " -> ");
    const Words words = absl::StrSplit(sides[0], ' ', absl::SkipEmpty());
    const std::string expected = sides.size() > 1 ? sides[1] : "";
    ASSERT_EQ(interpreter.Run(words), expected)
        << GetParam() << ".txt:" << number << ": " << text;
  }
}

INSTANTIATE_TEST_SUITE_P(
    Stories, DispatchScenarioTest,
    ::testing::ValuesIn(testing::ScenarioNames("dispatch")),
    [](const auto& test) { return test.param; });

}  // namespace
}  // namespace weft::dispatch
