// The output directory of a build: written beside its place, renamed at the end, removed when the build fails.
#pragma once

#include <string>

#include "data/build.h"

namespace tessera::data {

// Fails when `out` lies inside the input directory: the next build would read its own output.
void check_output_outside(const std::string& out, const std::string& input);

class OutputDirectory {
 public:
  explicit OutputDirectory(const std::string& path);
  ~OutputDirectory();  // removes what was begun and not committed
  OutputDirectory(const OutputDirectory&) = delete;
  OutputDirectory& operator=(const OutputDirectory&) = delete;

  bool exists() const;  // and is not just an empty directory
  // What the directory that is there was built from. One that no build made is never replaced: an error.
  BuildSummary record(bool replace) const;
  const std::string& begin();
  void commit();

 private:
  void remove_abandoned() const;

  std::string path_, partial_;
  bool begun_ = false;
};

}  // namespace tessera::data
