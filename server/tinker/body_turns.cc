#include "server/tinker/body_turns.h"

namespace weft::tinker {

void BodyTurns::Add(const std::string& owner, Work read, Work serve) {
  waiting_.Add(owner, {std::move(read), std::move(serve)});
  Next();
}

void BodyTurns::Next() {
  if (reading_ || waiting_.empty()) return;
  Body body = waiting_.Take();
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
