// What goes from one log to another as a whole: its unit. An adapter is a unit
// of its own, but those of a session of the Tinker API are one unit together
// with the notes that the server's front keeps of the session.
//
// A unit of one adapter has the adapter's name. That of a session has the
// session's id, which nobody can guess, so no other tenant's adapter is in it.
#ifndef WEFT_SRC_REQUEST_MOVE_UNIT_H_
#define WEFT_SRC_REQUEST_MOVE_UNIT_H_

#include <string>
#include <vector>

#include "absl/strings/string_view.h"

namespace weft {

// Returns the adapter's unit: SESSION for "SESSION.train.N", with or without
// "TENANT~" before it, where SESSION has 32 characters. The unit of a unit is
// itself.
std::string UnitOf(absl::string_view adapter_id);

// Returns the unit of a note: SESSION for "tinker/KIND/SESSION", alone or
// before ":", if KIND is session, model, sampler, making or loss. Empty for
// notes that stay where they are.
std::string UnitOfNote(absl::string_view name);

// Returns what the names of a unit's notes begin with. Others may begin so,
// too.
std::vector<std::string> NotePrefixesOf(absl::string_view unit);

}  // namespace weft

#endif  // WEFT_SRC_REQUEST_MOVE_UNIT_H_
