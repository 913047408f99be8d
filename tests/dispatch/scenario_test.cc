// Runs the scenarios in scenarios/, whose README.md describes their language.
#include <algorithm>
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

bool Has(const Words& words, const std::string& word) {
  return std::ranges::find(words, word) != words.end();
}

absl::Duration Seconds(const std::string& word) {
  double seconds = 0;
  EXPECT_TRUE(absl::SimpleAtod(word, &seconds)) << word;
  return absl::Seconds(seconds);
}

// "10x3,7" means data of 10, 10, 10 and 7 tokens.
std::vector<int64_t> DataTokens(const std::string& text) {
  std::vector<int64_t> tokens;
  for (const absl::string_view part : absl::StrSplit(text, ',')) {
    const std::vector<std::string> pair = absl::StrSplit(part, 'x');
    const int64_t count = pair.size() == 2 ? Number(pair[1]) : 1;
    tokens.insert(tokens.end(), count, Number(pair[0]));
  }
  return tokens;
}

// "1-3" means the calls 1, 2 and 3.
Words Calls(const std::string& word) {
  const std::vector<std::string> ends = absl::StrSplit(word, '-');
  if (ends.size() < 2) return {word};
  Words calls;
  for (int64_t call = Number(ends[0]); call <= Number(ends[1]); ++call) {
    calls.push_back(absl::StrCat(call));
  }
  return calls;
}

// A whole request has no text.
std::string SliceText(const TrainSlice& slice) {
  if (slice.first_datum == 0 && slice.last) return "";
  return absl::StrCat("[", slice.first_datum, ":",
                      slice.first_datum + slice.num_data,
                      slice.last ? "]" : "+]");
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
    options.scheduler.sampling_share =
        static_cast<double>(Number(Option(words, "percent", "50"))) / 100;
    const std::string weights = Option(words, "weights", "");
    for (const auto entry : absl::StrSplit(weights, ',', absl::SkipEmpty())) {
      const std::vector<std::string> pair = absl::StrSplit(entry, ':');
      options.scheduler.tenant_weights[pair.at(0)] = Number(pair.at(1));
    }
    options.records_steps = Has(words, "recorded");
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

  // Sends the calls. Returns the code of the last one if it is refused at once.
  std::string Send(const Words& words,
                   CancelHandle (Interpreter::*send)(const std::string& call,
                                                     const Words& words)) {
    std::string refusal;
    for (const std::string& call : Calls(words.at(1))) {
      const size_t before = answers_.size();
      handles_[call] = (this->*send)(call, words);
      refusal.clear();
      if (answers_.size() > before) {
        refusal = answers_.back().substr(call.size() + 1);
        answers_.pop_back();
      }
    }
    return refusal;
  }

  absl::Time Deadline(const Words& words) {
    const std::string late = Option(words, "deadline", "");
    return late.empty() ? absl::InfiniteFuture()
                        : engine_->clock().Now() + Seconds(late);
  }

  // Returns the request that has what all kinds of steps have.
  template <typename Request>
  Request StepOf(const Words& words) {
    Request request;
    request.adapter_id = words.at(2) == "base" ? "" : words.at(2);
    request.step = static_cast<uint64_t>(Number(Option(words, "step", "0")));
    request.deadline = Deadline(words);
    if (const std::string life = Option(words, "epoch", ""); !life.empty()) {
      request.epoch = dispatcher().adapters().Info(request.adapter_id)->epoch;
      if (life == "past") --request.epoch;
    }
    return request;
  }

  CancelHandle SendTrain(const std::string& call, const Words& words) {
    auto train = StepOf<TrainRequest>(words);
    const auto payload =
        static_cast<int32_t>(Number(Option(words, "payload", "0")));
    train.unnumbered = words[0] == "score";
    train.backward = !train.unnumbered && !Has(words, "forward");
    WorkItem item = TrainItem();
    item.backward = train.backward;
    item.unnumbered = train.unnumbered;
    item.alone = Has(words, "alone");
    item.datum_tokens = DataTokens(Option(words, "data", "10"));
    if (const std::string prefix = Option(words, "prefix", "");
        !prefix.empty()) {
      item.datum_prefix = DataTokens(prefix);
    }
    if (const std::string teacher = Option(words, "teacher", "");
        !teacher.empty()) {
      const Words name = absl::StrSplit(teacher, ':');
      train.loss.function = LossFunction::kForwardKl;
      train.loss.teacher = {.adapter_id = name[0],
                            .snapshot = name.size() > 1 ? name[1] : ""};
    }
    for (const int64_t tokens : item.datum_tokens) {
      const std::vector<int32_t> ids(tokens, payload);
      train.data.push_back({.tokens = ids, .targets = ids});
    }
    return dispatcher().steps().Submit(std::move(train), std::move(item),
                                       StepAnswer(call));
  }

  CancelHandle SendStep(const std::string& call, const Words& words) {
    const auto payload =
        static_cast<double>(Number(Option(words, "payload", "0")));
    StepRequest request;
    WorkItem item = {.kind = WorkKind::kAdapterOp, .tokens = 1};
    if (words[0] == "optim") {
      item.kind = WorkKind::kOptim;
      auto optim = StepOf<OptimStepRequest>(words);
      optim.adamw.learning_rate = payload;
      request = std::move(optim);
    } else if (words[0] == "invalid") {
      item.empty = true;
      auto refused = StepOf<RefusedStep>(words);
      refused.digest = absl::StrCat("invalid ", payload);
      refused.status = absl::InvalidArgumentError("");
      request = std::move(refused);
    } else if (words[0] == "save") {
      request = StepOf<SaveCheckpointRequest>(words);
    } else {
      item.numbered = true;
      request = StepOf<LoadCheckpointRequest>(words);
    }
    return dispatcher().steps().Submit(std::move(request), std::move(item),
                                       StepAnswer(call));
  }

  CancelHandle SendSample(const std::string& call, const Words& words) {
    SampleRequest request;
    request.adapter_id = words.at(2) == "base" ? "" : words.at(2);
    request.prompt = {1, 2};
    request.deadline = Deadline(words);
    request.config.max_tokens =
        static_cast<int>(Number(Option(words, "tokens", "10"))) - 2;
    return dispatcher().samples().Submit(
        std::move(request), nullptr,
        [this, call](const absl::StatusOr<SampleResult>& result) {
          Answer(call, absl::StatusCodeToString(result.status().code()));
        });
  }

  static std::string NameOf(const std::string& adapter) {
    return adapter.empty() ? "base" : adapter;
  }

  std::string NameStep(const StepTask& step) {
    const std::string name =
        absl::StrCat(NameOf(AdapterIdOf(*step.request)), "/", step.step);
    running_[name] = step;
    return name;
  }

  std::string Next(const Words& words) {
    const std::string decodes =
        Option(words, "decodes", absl::StrCat(decoding_.size()));
    const std::optional<Work> work =
        engine_->Next(static_cast<int>(Number(decodes)));
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
    const auto& train = std::get<RunTrain>(*work);
    std::string text = train.backward ? "train" : "forward";
    for (const auto& [slice, step] : train.slices) {
      absl::StrAppend(&text, " ", NameStep(step), SliceText(slice));
    }
    return text;
  }

  using Shares = std::map<std::string, int64_t>;

  static std::string SharesText(const Shares& shares) {
    return absl::StrJoin(shares, " ", absl::PairFormatter(" "));
  }

  // Runs batches to their ends. REQUIRES: no batch divides a request.
  std::string RunBatches(const Words& words) {
    Shares shares;
    for (int64_t i = 0; i < Number(words.at(1)); ++i) {
      const std::optional<Work> work = engine_->Next();
      for (const auto& [slice, step] : std::get<RunTrain>(*work).slices) {
        const std::string& adapter = AdapterIdOf(*step.request);
        shares[adapter] += std::get<TrainRequest>(*step.request).num_tokens();
        dispatcher().steps().Complete(step.id, TrainResult());
      }
    }
    return SharesText(shares);
  }

  std::string Draw(const Words& words) {
    Shares shares;
    for (int64_t i = 0; i < Number(words.at(1)); ++i) {
      const std::optional<SampleTask> sample = dispatcher().samples().Take();
      shares[sample->request->adapter_id] +=
          2 + sample->request->config.max_tokens;
      dispatcher().samples().Finish(sample->id, SampleResult());
    }
    return SharesText(shares);
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
    return NameOf(sample->request->adapter_id);
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
        static_cast<uint64_t>(Number(Option(words, "last", "0"))),
        Has(words, "forgotten") ? Durability::kMemory : Durability::kStep);
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
  const Handler train_ = [this](const Words& w) {
    return Send(w, &Interpreter::SendTrain);
  };
  const Handler step_ = [this](const Words& w) {
    return Send(w, &Interpreter::SendStep);
  };
  const std::map<std::string, Handler> handlers_ = {
      {"create", [this](const Words& w) { return Create(w); }},
      {"remove", [this](const Words& w) { return Remove(w); }},
      {"train", train_},
      {"score", train_},
      {"optim", step_},
      {"load", step_},
      {"save", step_},
      {"invalid", step_},
      {"sample",
       [this](const Words& w) { return Send(w, &Interpreter::SendSample); }},
      {"cancel",
       [this](const Words& w) {
         return Nothing([&] { handles_.at(w.at(1)).Cancel(); });
       }},
      {"next", [this](const Words& w) { return Next(w); }},
      {"run", [this](const Words& w) { return RunBatches(w); }},
      {"draw", [this](const Words& w) { return Draw(w); }},
      {"undivided",
       [this](const Words& w) {
         return std::string(
             dispatcher().recovery().FinishSlices(w.at(1) == "yes") ? "yes"
                                                                    : "no");
       }},
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
      {"loss",
       [this](const Words& w) {
         return Nothing([&] {
           dispatcher().steps().ChargeTime(running_.at(w.at(1)),
                                           Seconds(w.at(2)));
         });
       }},
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
         return Nothing([&] { engine_->clock().Advance(Seconds(w.at(1))); });
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
      {"stop", [this](const Words&) {
         return Nothing([&] {
           dispatcher().Stop();
           dispatcher().Close(absl::UnavailableError("stopped"));
         });
       }}};
};

class DispatchScenarioTest : public ::testing::TestWithParam<std::string> {};

TEST_P(DispatchScenarioTest, AnswersAsWritten) {
  std::ifstream file(testing::ScenarioPath(GetParam()));
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

INSTANTIATE_TEST_SUITE_P(Stories, DispatchScenarioTest,
                         ::testing::ValuesIn(testing::ScenarioNames()),
                         [](const auto& test) { return test.param; });

}  // namespace
}  // namespace weft::dispatch
