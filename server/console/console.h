// The console: a page at / that shows what the server does, and the JSON that
// the page asks for every two seconds. The HTTP front serves both.
//
//   GET /                  the page; open to everybody, it holds no data
//   GET /console/v1/NAME   its script and style sheet
//   GET /console/v1/state  state.h; needs a token of scope read, if the server
//                          has tokens: "Authorization: Bearer TOKEN"
// The query of `state`: q (StateQuery::search), adapter (StateQuery::selected),
// and checkpoints=1 to get the checkpoints of this adapter, too.
#ifndef WEFT_SERVER_CONSOLE_CONSOLE_H_
#define WEFT_SERVER_CONSOLE_CONSOLE_H_

#include <optional>

#include "server/tinker/front.h"

namespace weft::console {

// Judges the header of a request, as tinker::Admit does. Returns none if the
// path is not the console's.
// Threads: the front's.
[[nodiscard]] std::optional<tinker::Admission> Admit(
    tinker::Front& front, const tinker::HttpRequest& header);

}  // namespace weft::console

#endif  // WEFT_SERVER_CONSOLE_CONSOLE_H_
