// One writer a directory of checkpoints: flock on `<root>/.lock`, which the kernel drops when the process ends, however
// it ends. The file names its holder, for the message that another run gets.
#pragma once

#include <memory>
#include <string>

namespace tessera::ckpt {

// A run holds one for as long as it may save; `save` and `prune` take it too. Within a process it counts like a shared
// pointer. UserError with the holder's pid when another process has it.
class WriterLock {
 public:
  explicit WriterLock(const std::string& root);  // creates the directory when missing

 private:
  struct Held;
  std::shared_ptr<Held> held_;
};

}  // namespace tessera::ckpt
