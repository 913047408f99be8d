// Notes: bytes that the server keeps under names across restarts. With
// --state-dir the engine's log has them; the engine does not read them.
#ifndef WEFT_SRC_REQUEST_NOTE_H_
#define WEFT_SRC_REQUEST_NOTE_H_

#include <map>
#include <memory>
#include <string>

namespace weft {

// Notes by name. Values are shared, because a step's request may be large.
using Notes = std::map<std::string, std::shared_ptr<const std::string>>;

}  // namespace weft

#endif  // WEFT_SRC_REQUEST_NOTE_H_
