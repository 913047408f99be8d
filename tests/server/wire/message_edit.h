// Changes protobuf messages by text, for tables of changes.
#ifndef WEFT_TESTS_SERVER_WIRE_MESSAGE_EDIT_H_
#define WEFT_TESTS_SERVER_WIRE_MESSAGE_EDIT_H_

#include "absl/strings/string_view.h"
#include "google/protobuf/message.h"

namespace weft::server {

// Makes the changes, which have "; " between them:
//   PATH = VALUE    sets a field, or an entry of a list: data[0].tokens[2] = 7
//   PATH += VALUE   adds to a list
//   clear PATH      clears a field
//   pop PATH        removes the last entry of a list
// VALUE is that of protobuf's text format: 7, -inf, 'text', [1, 2], {key: 'a'}.
// VALUE * N is a list of N equal entries, or a text N times. A change that
// cannot be made is a test failure.
void Edit(google::protobuf::Message* message, absl::string_view changes);

// Returns the message with the changes.
template <typename Message>
Message Edited(Message message, absl::string_view changes) {
  Edit(&message, changes);
  return message;
}

// Returns a message with the changes only.
template <typename Message>
Message Make(absl::string_view changes) {
  return Edited(Message(), changes);
}

}  // namespace weft::server

#endif  // WEFT_TESTS_SERVER_WIRE_MESSAGE_EDIT_H_
