#include "server/tinker/body_turns.h"

namespace weft::tinker {

void BodyTurns::Add(const std::string& owner, Work read, Work serve) {
  waiting_[owner].push_back({std::move(read), std::move(serve)});
  Next();
}

void BodyTurns::Next() {
  if (reading_ || waiting_.empty()) return;
  auto turn = waiting_.upper_bound(last_);
  if (turn == waiting_.end()) turn = waiting_.begin();
  last_ = turn->first;
  Body body = std::move(turn->second.front());
  turn->second.pop_front();
  if (turn->second.empty()) waiting_.erase(turn);
  reading_ = true;
  // The reader's thread keeps no copy of `serve`, whose last one may close a
  // connection.
  reader_.Post([this, body = std::move(body)]() mutable {
    body.read();
    after_(absl::ZeroDuration(), [this, serve = std::move(body.serve)] {
      reading_ = false;
      serve();
      Next();
    });
  });
}

}  // namespace weft::tinker
