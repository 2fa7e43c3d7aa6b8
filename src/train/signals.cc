#include "train/signals.h"

#include <csignal>

namespace tessera::train {
namespace {

volatile std::sig_atomic_t stop_asked = 0;

extern "C" void on_stop_signal(int number) {
  if (stop_asked != 0) {
    std::signal(number, SIG_DFL);
    std::raise(number);
  }
  stop_asked = 1;
}

}  // namespace

StopSignals::StopSignals() {
  stop_asked = 0;
  std::signal(SIGINT, on_stop_signal);
  std::signal(SIGTERM, on_stop_signal);
}

StopSignals::~StopSignals() {
  std::signal(SIGINT, SIG_DFL);
  std::signal(SIGTERM, SIG_DFL);
}

bool StopSignals::asked() { return stop_asked != 0; }

}  // namespace tessera::train
