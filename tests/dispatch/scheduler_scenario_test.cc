// Runs tests/dispatch/scheduler/scenarios/*.txt; README.md there explains the language.
#include <algorithm>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "src/dispatch/scheduler.h"
#include "tests/support/adapter_keys.h"
#include "tests/support/scenarios.h"

namespace weft::dispatch {
namespace {

using Words = std::vector<std::string>;

int64_t Number(const std::string& text) {
  int64_t value = 0;
  EXPECT_TRUE(absl::SimpleAtoi(text, &value)) << "not a number: " << text;
  return value;
}

// Returns the value of `key=value` among the words, or `fallback`.
std::string Option(const Words& words, const std::string& key,
                   const std::string& fallback) {
  for (const std::string& word : words) {
    if (absl::StartsWith(word, key + "=")) return word.substr(key.size() + 1);
  }
  return fallback;
}

bool Has(const Words& words, const std::string& word) {
  return std::find(words.begin(), words.end(), word) != words.end();
}

absl::Duration Seconds(const std::string& text) {
  double seconds = 0;
  EXPECT_TRUE(absl::SimpleAtod(text, &seconds)) << "not a number: " << text;
  return absl::Seconds(seconds);
}

std::string YesNo(bool yes) { return yes ? "yes" : "no"; }

std::string Ids(const std::vector<uint64_t>& ids) {
  return ids.empty() ? "none" : absl::StrJoin(ids, " ");
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

std::string SliceText(const TrainSlice& slice) {
  if (slice.first_datum == 0 && slice.last) return absl::StrCat(slice.work_id);
  return absl::StrCat(slice.work_id, "[", slice.first_datum, ":",
                      slice.first_datum + slice.num_data,
                      slice.last ? "]" : "+]");
}

std::string PlanText(const Plan& plan) {
  switch (plan.kind) {
    case Plan::Kind::kNone:
      return "none";
    case Plan::Kind::kExclusive:
      return absl::StrCat("exclusive ", plan.work_id);
    case Plan::Kind::kDecode:
      return "decode";
    case Plan::Kind::kTrain:
      break;
  }
  Words slices;
  for (const TrainSlice& slice : plan.slices)
    slices.push_back(SliceText(slice));
  return absl::StrCat(plan.backward ? "backward " : "forward ",
                      absl::StrJoin(slices, " "));
}

class Interpreter {
 public:
  // Runs a command line and returns its answer, which the test compares with
  // the text after `->`.
  std::string Run(const Words& words) {
    const std::string& command = words[0];
    const auto handler = handlers_.find(command);
    if (handler == handlers_.end()) return "unknown command " + command;
    if (command != "options" && scheduler_ == nullptr) Options({"options"});
    return handler->second(words);
  }

 private:
  using Handler = std::function<std::string(const Words&)>;

  static AdapterKey Adapter(const std::string& word) {
    return Key(word == "base" ? "" : word);
  }

  std::string Options(const Words& words) {
    SchedulerOptions options;
    options.max_batch_tokens = Number(Option(words, "batch", "100"));
    options.sampling_share =
        static_cast<double>(Number(Option(words, "percent", "50"))) / 100;
    const std::string weights = Option(words, "weights", "");
    for (const auto entry : absl::StrSplit(weights, ',', absl::SkipEmpty())) {
      const std::vector<std::string> pair = absl::StrSplit(entry, ':');
      options.tenant_weights[pair.at(0)] = Number(pair.at(1));
    }
    scheduler_ = std::make_unique<Scheduler>(options);
    return "";
  }

  // Ids "1-40" mean forty requests. Returns the answer to the last request.
  std::string EnqueueAll(WorkKind kind, const Words& words) {
    const std::vector<std::string> ids = absl::StrSplit(words.at(1), '-');
    std::string answer;
    for (int64_t id = Number(ids.front()); id <= Number(ids.back()); ++id) {
      answer = Enqueue(kind, id, words);
    }
    return answer;
  }

  std::string Enqueue(WorkKind kind, int64_t id, const Words& words) {
    WorkItem item;
    item.kind = kind;
    item.id = id;
    item.adapter = Adapter(words.at(2));
    item.step = Number(Option(words, "step", "0"));
    item.backward = kind == WorkKind::kTrain && !Has(words, "forward");
    if (kind == WorkKind::kTrain) {
      item.datum_tokens = DataTokens(Option(words, "data", "10"));
      const std::string prefix = Option(words, "prefix", "");
      if (!prefix.empty()) item.datum_prefix = DataTokens(prefix);
    }
    item.tokens = Number(Option(words, "tokens", "0"));
    item.unnumbered = Has(words, "unnumbered");
    item.recorded = Has(words, "recorded");
    const std::string deadline = Option(words, "deadline", "");
    if (!deadline.empty()) {
      item.deadline = absl::UnixEpoch() + Seconds(deadline);
    }
    cost_[id] = {NameOf(item.adapter),
                 std::accumulate(item.datum_tokens.begin(),
                                 item.datum_tokens.end(), item.tokens)};
    const absl::StatusOr<uint64_t> step =
        scheduler_->Enqueue(std::move(item), now_);
    return step.ok() ? absl::StrCat("step ", *step)
                     : absl::StatusCodeToString(step.status().code());
  }

  using Shares = std::map<std::string, int64_t>;

  // Returns the tokens served, by adapter.
  static std::string SharesText(const Shares& shares) {
    return absl::StrJoin(shares, " ", absl::PairFormatter(" "));
  }

  // Runs a number of plans and returns the tokens served. REQUIRES: no plan
  // divides a request.
  std::string RunPlans(const Words& words) {
    Shares shares;
    for (int64_t i = 0; i < Number(words.at(1)); ++i) {
      const Plan plan = scheduler_->Next(now_, 0);
      for (const TrainSlice& slice : plan.slices) {
        const auto& [adapter, tokens] = cost_.at(slice.work_id);
        shares[adapter] += tokens;
        scheduler_->Finished(slice.work_id, /*ok=*/true);
      }
    }
    return SharesText(shares);
  }

  std::string Draw(const Words& words) {
    Shares shares;
    const auto count = static_cast<int>(Number(words.at(1)));
    for (const uint64_t id : scheduler_->TakeSamples(now_, count)) {
      const auto& [adapter, tokens] = cost_.at(id);
      shares[adapter] += tokens;
    }
    return SharesText(shares);
  }

  std::string Finish(const Words& words, bool ok) {
    for (size_t i = 1; i < words.size(); ++i) {
      scheduler_->Finished(Number(words[i]), ok);
    }
    return "";
  }

  std::string Account(const Words& words) {
    const std::map<std::string, Plan::Kind> kinds = {
        {"train", Plan::Kind::kTrain},
        {"exclusive", Plan::Kind::kExclusive},
        {"decode", Plan::Kind::kDecode}};
    scheduler_->AccountDeviceTime(kinds.at(words.at(1)), Seconds(words.at(2)));
    return "";
  }

  std::string Depth(const Words& words) {
    const std::map<std::string, WorkKind> kinds = {
        {"train", WorkKind::kTrain},
        {"optim", WorkKind::kOptim},
        {"op", WorkKind::kAdapterOp},
        {"sample", WorkKind::kSample}};
    return absl::StrCat(scheduler_->QueueDepth(kinds.at(words.at(1))));
  }

  absl::Time now_ = absl::UnixEpoch();
  std::unique_ptr<Scheduler> scheduler_;
  std::map<uint64_t, std::pair<std::string, int64_t>> cost_;  // Keys: requests.
  const std::map<std::string, Handler> handlers_ = {
      {"options", [this](const Words& w) { return Options(w); }},
      {"adapter",
       [this](const Words& w) {
         return YesNo(scheduler_->AddAdapter(Key(w.at(1)), w.at(1),
                                             Option(w, "tenant", w.at(1)),
                                             Number(Option(w, "last", "0"))));
       }},
      {"remove",
       [this](const Words& w) {
         return Ids(scheduler_->RemoveAdapter(Key(w.at(1))));
       }},
      {"train",
       [this](const Words& w) { return EnqueueAll(WorkKind::kTrain, w); }},
      {"optim",
       [this](const Words& w) { return EnqueueAll(WorkKind::kOptim, w); }},
      {"op",
       [this](const Words& w) { return EnqueueAll(WorkKind::kAdapterOp, w); }},
      {"sample",
       [this](const Words& w) { return EnqueueAll(WorkKind::kSample, w); }},
      {"withdraw",
       [this](const Words& w) {
         const uint64_t id = Number(w.at(1));
         if (scheduler_->Remove(id)) return std::string("removed");
         return std::string(scheduler_->Empty(id) ? "emptied" : "no");
       }},
      {"now",
       [this](const Words& w) {
         now_ = absl::UnixEpoch() + Seconds(w.at(1));
         return std::string();
       }},
      {"expired",
       [this](const Words&) { return Ids(scheduler_->Expired(now_)); }},
      {"next",
       [this](const Words& w) {
         return PlanText(scheduler_->Next(
             now_, static_cast<int>(Number(Option(w, "decodes", "0")))));
       }},
      {"take",
       [this](const Words& w) {
         return Ids(
             scheduler_->TakeSamples(now_, static_cast<int>(Number(w.at(1)))));
       }},
      {"run", [this](const Words& w) { return RunPlans(w); }},
      {"draw", [this](const Words& w) { return Draw(w); }},
      {"waiting",
       [this](const Words& w) {
         return absl::StrCat(scheduler_->QueueDepthOf(w.at(1)));
       }},
      {"ahead",
       [this](const Words& w) {
         return absl::StrCat(
             scheduler_->Ahead(Adapter(w.at(1)), Number(w.at(2))));
       }},
      {"putback",
       [this](const Words& w) {
         return YesNo(scheduler_->PutBack(Number(w.at(1))));
       }},
      {"done", [this](const Words& w) { return Finish(w, true); }},
      {"fail", [this](const Words& w) { return Finish(w, false); }},
      {"skipto",
       [this](const Words& w) {
         scheduler_->SkipTo(Key(w.at(1)), Number(w.at(2)));
         return std::string();
       }},
      {"last",
       [this](const Words& w) {
         const AdapterKey key = Key(w.at(1));
         return scheduler_->NextStep(key) == 0
                    ? std::string("unknown")
                    : absl::StrCat(scheduler_->LastStep(key));
       }},
      {"account", [this](const Words& w) { return Account(w); }},
      {"hold",
       [this](const Words& w) {
         scheduler_->SetHeld(Adapter(w.at(1)), w.at(2) == "yes");
         return std::string();
       }},
      {"undivided",
       [this](const Words& w) {
         scheduler_->SetUndividedOnly(w.at(1) == "yes");
         return std::string();
       }},
      {"idle", [this](const Words&) { return YesNo(scheduler_->Idle()); }},
      {"depth", [this](const Words& w) { return Depth(w); }},
  };
};

class ScenarioTest : public ::testing::TestWithParam<std::string> {};

TEST_P(ScenarioTest, GivesTheExpectedAnswers) {
  const std::string path =
      testing::ScenarioPath("dispatch/scheduler", GetParam());
  std::ifstream file(path);
  ASSERT_TRUE(file.is_open()) << path;
  Interpreter interpreter;
  std::string line;
  for (int number = 1; std::getline(file, line); ++number) {
    const std::string code = line.substr(0, line.find('#'));
    const size_t arrow = code.find("->");
    const Words words =
        absl::StrSplit(code.substr(0, arrow), ' ', absl::SkipWhitespace());
    if (words.empty()) continue;
    const std::string answer = interpreter.Run(words);
    // A command without `->` must succeed, whatever its answer. An answer with
    // "_" is the code of a refusal.
    if (arrow == std::string::npos) {
      EXPECT_FALSE(absl::StrContains(answer, "unknown command") ||
                   absl::StrContains(answer, "_"))
          << path << ":" << number << ": " << line << "\n  got: " << answer;
      continue;
    }
    const std::string expected(
        absl::StripAsciiWhitespace(code.substr(arrow + 2)));
    EXPECT_EQ(answer, expected) << path << ":" << number << ": " << line;
  }
}

INSTANTIATE_TEST_SUITE_P(
    Scenarios, ScenarioTest,
    ::testing::ValuesIn(testing::ScenarioNames("dispatch/scheduler")),
    [](const auto& scenario) { return scenario.param; });

}  // namespace
}  // namespace weft::dispatch
