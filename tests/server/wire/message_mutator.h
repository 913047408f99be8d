// Changes protobuf messages at random, by reflection: values at the edges of
// their types and limits, absent fields, lists that are too short or too long.
#ifndef WEFT_TESTS_SERVER_WIRE_MESSAGE_MUTATOR_H_
#define WEFT_TESTS_SERVER_WIRE_MESSAGE_MUTATOR_H_

#include <cstddef>
#include <cstdint>
#include <random>
#include <string>

#include "google/protobuf/descriptor.h"
#include "google/protobuf/message.h"

namespace weft::server {

class MessageMutator {
 public:
  // Equal seeds make equal changes.
  explicit MessageMutator(uint64_t seed) : random_(seed) {}

  // Makes one to four changes.
  void Mutate(google::protobuf::Message* message);
  // Makes one to four changes to the bytes of a serialized message.
  void Mutate(std::string* bytes);

  // Returns a number in [0, limit).
  size_t Below(size_t limit) { return random_() % limit; }
  bool OneIn(size_t n) { return Below(n) == 0; }

 private:
  void Change(google::protobuf::Message* message);
  void ChangeList(google::protobuf::Message* message,
                  const google::protobuf::FieldDescriptor* field);
  // Writes a value to a field, or to item `index` of a list. If `index` is the
  // list's size, adds an item. -1: the field is not a list.
  void Put(google::protobuf::Message* message,
           const google::protobuf::FieldDescriptor* field, int index);

  uint64_t Integer();
  double Real();
  std::string Text();

  std::mt19937_64 random_;
};

}  // namespace weft::server

#endif  // WEFT_TESTS_SERVER_WIRE_MESSAGE_MUTATOR_H_
