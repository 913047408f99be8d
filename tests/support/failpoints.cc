#include "tests/support/failpoints.h"

#include <signal.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <iostream>
#include <map>
#include <mutex>
#include <random>
#include <regex>
#include <sstream>
#include <thread>
#include <vector>

#include "src/base/files/failpoint.h"

namespace weft {
namespace {

struct Action {
  std::string name;  // A name, or a prefix that ends in '*'.
  std::string verb;
  int argument = 0;  // An errno or a number of milliseconds.
  double probability = 1;
  int64_t first = 1;
  int64_t last = INT64_MAX;
  int64_t hits = 0;
};

[[noreturn]] void Refuse(const std::string& text) {
  std::cerr << "failpoints: " << text << " makes no sense\n";
  std::abort();
}

int Argument(const std::string& verb, const std::string& text) {
  static const std::map<std::string, int> errors = {
      {"EDQUOT", EDQUOT}, {"EINTR", EINTR},   {"EIO", EIO},
      {"EMFILE", EMFILE}, {"ENOENT", ENOENT}, {"ENOSPC", ENOSPC},
      {"EROFS", EROFS}};
  if (verb == "sleep") return std::stoi(text);
  const auto error = errors.find(text);
  if (error == errors.end()) Refuse(text);
  return error->second;
}

Action ParseAction(const std::string& name, const std::string& text) {
  static const std::regex pattern(
      R"((short|kill|(err|sleep)\((\w+)\))(@([\d.]+))?(#(\d+)(-(\d+))?)?)");
  std::smatch match;
  if (!std::regex_match(text, match, pattern)) Refuse(text);
  Action action{.name = name, .verb = match[2].matched ? match[2] : match[1]};
  if (match[3].matched) action.argument = Argument(action.verb, match[3]);
  if (match[5].matched) action.probability = std::stod(match[5]);
  if (match[7].matched) {
    action.first = std::stoll(match[7]);
    action.last = match[9].matched ? std::stoll(match[9]) : action.first;
  }
  return action;
}

std::vector<std::string> Split(const std::string& text, char separator) {
  std::vector<std::string> parts;
  std::istringstream stream(text);
  for (std::string part; std::getline(stream, part, separator);) {
    if (!part.empty()) parts.push_back(part);
  }
  return parts;
}

std::vector<Action> Parse(const std::string& text) {
  std::vector<Action> actions;
  for (const std::string& entry : Split(text, ';')) {
    const size_t equals = entry.find('=');
    if (equals == std::string::npos || equals == 0) Refuse(entry);
    const auto parts = Split(entry.substr(equals + 1), '|');
    if (parts.empty()) Refuse(entry);
    for (const std::string& part : parts) {
      actions.push_back(ParseAction(entry.substr(0, equals), part));
    }
  }
  return actions;
}

bool Matches(const Action& action, const std::string& name) {
  if (action.name.back() != '*') return action.name == name;
  return name.compare(0, action.name.size() - 1, action.name, 0,
                      action.name.size() - 1) == 0;
}

// The actions and hits of all failpoints. A mutex guards them, because any
// thread may pass a failpoint.
class Failpoints {
 public:
  Failpoints() {
    const char* const text = std::getenv("WEFT_FAILPOINTS");
    const char* const seed = std::getenv("WEFT_FAILPOINTS_SEED");
    Set(text ? text : "", seed ? std::stoull(seed) : 0);
  }

  void Set(const std::string& text, uint64_t seed) {
    std::vector<Action> actions = Parse(text);
    const std::lock_guard lock(mu_);
    actions_ = std::move(actions);
    random_.seed(seed);
    hits_.clear();
  }

  // Returns the actions that this hit of the failpoint triggers.
  std::vector<Action> Hit(const std::string& name) {
    const std::lock_guard lock(mu_);
    ++hits_[name];
    std::vector<Action> triggered;
    for (Action& action : actions_) {
      if (!Matches(action, name)) continue;
      ++action.hits;
      if (action.hits < action.first || action.hits > action.last) continue;
      if (std::uniform_real_distribution<>()(random_) < action.probability) {
        triggered.push_back(action);
      }
    }
    return triggered;
  }

  int64_t Hits(const std::string& name) {
    const std::lock_guard lock(mu_);
    return hits_[name];
  }

 private:
  std::mutex mu_;
  std::vector<Action> actions_;
  std::mt19937_64 random_;
  std::map<std::string, int64_t> hits_;
};

// Never destroyed, because threads may pass failpoints while the process ends.
Failpoints& All() {
  static auto* const all = new Failpoints;
  return *all;
}

}  // namespace

void SetFailpoints(const std::string& text, uint64_t seed) {
  All().Set(text, seed);
}

int64_t FailpointHits(const std::string& name) { return All().Hits(name); }

}  // namespace weft

extern "C" int weft_failpoint(const char* name, size_t* size) {
  int error = 0;
  for (const weft::Action& action : weft::All().Hit(name)) {
    if (action.verb == "sleep") {
      std::this_thread::sleep_for(std::chrono::milliseconds(action.argument));
    } else if (action.verb == "kill") {
      const std::string line = std::string("failpoint ") + name + " kills\n";
      if (::write(STDERR_FILENO, line.data(), line.size()) < 0) std::abort();
      ::kill(::getpid(), SIGKILL);
    } else if (action.verb == "err") {
      error = action.argument;
    } else if (size != nullptr && *size > 1) {
      *size /= 2;
    }
  }
  return error;
}
