// AdapterKey: the number by which the server knows an adapter.
#ifndef WEFT_SRC_REQUEST_ADAPTER_KEY_H_
#define WEFT_SRC_REQUEST_ADAPTER_KEY_H_

#include <cstdint>

namespace weft {

// A client may delete an adapter and create another one with the same name. The
// new adapter gets a new key. So work of the deleted adapter is never mistaken
// for work of the new one.
enum class AdapterKey : uint64_t {
  kBaseModel = 0,
  // Whatever gives tenants their turns knows the base model also by a key for
  // each tenant that uses it, from here on. Nothing else does.
  kFirstTenantsBaseModel = uint64_t{1} << 63,
};

constexpr bool IsBaseModel(AdapterKey key) {
  return key == AdapterKey::kBaseModel ||
         key >= AdapterKey::kFirstTenantsBaseModel;
}

}  // namespace weft

#endif  // WEFT_SRC_REQUEST_ADAPTER_KEY_H_
