// Ciphers for sealed files in tests.
#pragma once

#include "mlx_h2o.h"

// What a cipher was asked for so far.
typedef struct CipherUse_ {
  int opened, closed, encrypted, decrypted, released;
  // Counts down with each sealing, which fails from 1 on; 0: none fails.
  int fails_in;
} CipherUse;

// No cipher, but bytes that look like none: each is mixed with key and nonce, and a tag tells
// changes. The key is 1 to 255.
mlx_h2o_seal toy_cipher(CipherUse* use, int key);

// A cipher in the process at the other end of two pipes (tests/sealed_by_python.py).
mlx_h2o_seal piped_cipher(int to, int from);
