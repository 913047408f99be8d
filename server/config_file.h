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

// Reads the file's settings. Adds to `errors` every name that is no setting or
// comes twice, every value that does not parse, and where the text is no JSON.
void ReadConfigFile(const std::string& path, Settings* settings,
                    std::vector<std::string>* errors);

// All settings as such a file, with a comment at those that are not defaults.
[[nodiscard]] std::string ConfigText(const Settings& settings);

}  // namespace weft

#endif  // WEFT_SERVER_CONFIG_FILE_H_
