#include "server/call/read_turns.h"

namespace weft::server {

bool ReadTurns::Begin(const std::string& client, const void* call, Read read) {
  {
    MutexLock lock(&mu_);
    Line& line = lines_[client];
    if (line.num_reading == kAtOnce) {
      if (line.waiting.size() == kMostWaiting) return false;
      line.waiting.emplace_back(call, std::move(read));
      return true;
    }
    ++line.num_reading;
  }
  read();
  return true;
}

void ReadTurns::End(const std::string& client) {
  Read next;
  {
    MutexLock lock(&mu_);
    const auto line = lines_.find(client);
    if (line->second.waiting.empty()) {
      if (--line->second.num_reading == 0) lines_.erase(line);
      return;
    }
    next = std::move(line->second.waiting.front().second);
    line->second.waiting.pop_front();
  }
  next();
}

bool ReadTurns::Remove(const std::string& client, const void* call) {
  MutexLock lock(&mu_);
  const auto line = lines_.find(client);
  return line != lines_.end() &&
         std::erase_if(line->second.waiting, [call](const auto& waiting) {
           return waiting.first == call;
         }) > 0;
}

}  // namespace weft::server
