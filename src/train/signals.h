// SIGINT and SIGTERM ask the run to stop at the next step boundary; a second one ends the process as usual.
#pragma once

namespace tessera::train {

class StopSignals {
 public:
  StopSignals();
  ~StopSignals();  // restores what was there
  StopSignals(const StopSignals&) = delete;
  StopSignals& operator=(const StopSignals&) = delete;

  static bool asked();
};

}  // namespace tessera::train
