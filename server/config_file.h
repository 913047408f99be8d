// The file of --config: a JSON object with flags, without their dashes, as
// names. Lines may be comments.
//
//   {
//     // Two tenants share this server.
//     "model": "/models/base",
//     "max-rank": 64,
//     "tenant-weights": "research=3,nightly=1"
//   }
#ifndef WEFT_SERVER_CONFIG_FILE_H_
#define WEFT_SERVER_CONFIG_FILE_H_

#include <string>
#include <vector>

#include "server/flags.h"

namespace weft {

// Reads the file's settings. Adds to `errors` every name that is not a setting
// or is repeated, every value that does not parse, and the place where the text
// is not JSON.
void ReadConfigFile(const std::string& path, Settings* settings,
                    std::vector<std::string>* errors);

// Returns all settings as such a file, with a comment at each one that is not
// the default.
[[nodiscard]] std::string ConfigText(const Settings& settings);

}  // namespace weft

#endif  // WEFT_SERVER_CONFIG_FILE_H_
