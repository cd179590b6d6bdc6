#include "ciphers.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { NONCE = 12, TAG = 16, SALT = 32 };

// -- a toy ----------------------------------------------------------------------------------------

typedef struct Toy_ {
  CipherUse* use;
  int key;
} Toy;

typedef struct ToyOfFile_ {
  CipherUse* use;
  uint8_t key[SALT];
} ToyOfFile;

static void toy_release(void* context) {
  Toy* toy = context;
  ++toy->use->released;
  free(toy);
}

static void* toy_open(void* context, const uint8_t* salt, size_t n_salt) {
  const Toy* toy = context;
  ToyOfFile* file = malloc(sizeof *file);
  if (!file || n_salt != SALT) return free(file), NULL;
  ++toy->use->opened;
  file->use = toy->use;
  for (int i = 0; i < SALT; ++i) file->key[i] = (uint8_t)(salt[i] + toy->key * (i + 1));
  return file;
}

static void toy_close(void* cipher) {
  ++((ToyOfFile*)cipher)->use->closed;
  free(cipher);
}

static void mixed(const ToyOfFile* file, const uint8_t* nonce, uint8_t* data, size_t n) {
  for (size_t i = 0; i < n; ++i)
    data[i] ^= (uint8_t)(file->key[i % SALT] + 7 * nonce[i % NONCE] + 13 * (i >> 5) + 1);
}

static void tag_of(
    const ToyOfFile* file, const uint8_t* nonce, const uint8_t* associated, size_t n_associated,
    const uint8_t* data, size_t n, uint8_t* tag) {
  uint64_t sums[2] = {1, 2};
  for (int i = 0; i < SALT; ++i) sums[i % 2] = sums[i % 2] * 31 + file->key[i];
  for (int i = 0; i < NONCE; ++i) sums[i % 2] = sums[i % 2] * 31 + nonce[i];
  for (size_t i = 0; i < n_associated; ++i) sums[i % 2] = sums[i % 2] * 31 + associated[i];
  for (size_t i = 0; i < n; ++i) sums[i % 2] = sums[i % 2] * 31 + data[i];
  memcpy(tag, sums, TAG);
}

static int toy_encrypt(
    void* cipher, const uint8_t* nonce, const uint8_t* associated, size_t n_associated,
    uint8_t* data, size_t n, uint8_t* tag) {
  const ToyOfFile* file = cipher;
  if (file->use->fails_in == 1) return 1;
  if (file->use->fails_in) --file->use->fails_in;
  ++file->use->encrypted;
  mixed(file, nonce, data, n);
  tag_of(file, nonce, associated, n_associated, data, n, tag);
  return 0;
}

static int toy_decrypt(
    void* cipher, const uint8_t* nonce, const uint8_t* associated, size_t n_associated,
    uint8_t* data, size_t n, const uint8_t* tag) {
  const ToyOfFile* file = cipher;
  uint8_t expected[TAG];
  tag_of(file, nonce, associated, n_associated, data, n, expected);
  if (memcmp(tag, expected, TAG)) return 1;
  ++file->use->decrypted;
  mixed(file, nonce, data, n);
  return 0;
}

mlx_h2o_seal toy_cipher(CipherUse* use, int key) {
  Toy* toy = malloc(sizeof *toy);
  if (toy) toy->use = use, toy->key = key;
  return (mlx_h2o_seal){sizeof(mlx_h2o_seal), toy,        toy_release, toy_open, toy_close,
                        toy_encrypt,          toy_decrypt};
}

// -- another process ------------------------------------------------------------------------------

typedef struct Pipes_ {
  int to, from;
  pthread_mutex_t turn;  // of the threads of the model and of the writer
} Pipes;

typedef struct PipesOfFile_ {
  Pipes* pipes;
  uint32_t number;
} PipesOfFile;

static bool sent(const Pipes* pipes, const void* data, size_t n) {
  const char* rest = data;
  for (ssize_t count; n; rest += count, n -= (size_t)count)
    if ((count = write(pipes->to, rest, n)) <= 0) return false;
  return true;
}

static bool got(const Pipes* pipes, void* data, size_t n) {
  char* rest = data;
  for (ssize_t count; n; rest += count, n -= (size_t)count)
    if ((count = read(pipes->from, rest, n)) <= 0) return false;
  return true;
}

static void pipes_release(void* context) {
  free(context);
}

static void* pipes_open(void* context, const uint8_t* salt, size_t n_salt) {
  PipesOfFile* file = malloc(sizeof *file);
  if (!file || n_salt != SALT) return free(file), NULL;
  file->pipes = context;
  pthread_mutex_lock(&file->pipes->turn);
  const bool done = sent(file->pipes, "o", 1) && sent(file->pipes, salt, SALT) &&
      got(file->pipes, &file->number, sizeof file->number);
  pthread_mutex_unlock(&file->pipes->turn);
  return done ? file : (free(file), NULL);
}

static int piped(
    char what, void* cipher, const uint8_t* nonce, const uint8_t* associated, size_t n_associated,
    uint8_t* data, size_t n, uint8_t* tag) {
  const PipesOfFile* file = cipher;
  const uint32_t sizes[] = {file->number, (uint32_t)n_associated, (uint32_t)n};
  uint8_t failed = 1;
  pthread_mutex_lock(&file->pipes->turn);
  const bool done = sent(file->pipes, &what, 1) && sent(file->pipes, sizes, sizeof sizes) &&
      sent(file->pipes, nonce, NONCE) && sent(file->pipes, associated, n_associated) &&
      sent(file->pipes, data, n) && sent(file->pipes, tag, TAG) && got(file->pipes, &failed, 1) &&
      !failed && got(file->pipes, data, n) && got(file->pipes, tag, TAG);
  pthread_mutex_unlock(&file->pipes->turn);
  return !done;
}

static int pipes_encrypt(
    void* cipher, const uint8_t* nonce, const uint8_t* associated, size_t n_associated,
    uint8_t* data, size_t n, uint8_t* tag) {
  memset(tag, 0, TAG);
  return piped('e', cipher, nonce, associated, n_associated, data, n, tag);
}

static int pipes_decrypt(
    void* cipher, const uint8_t* nonce, const uint8_t* associated, size_t n_associated,
    uint8_t* data, size_t n, const uint8_t* tag) {
  uint8_t copy[TAG];
  memcpy(copy, tag, TAG);
  return piped('d', cipher, nonce, associated, n_associated, data, n, copy);
}

mlx_h2o_seal piped_cipher(int to, int from) {
  Pipes* pipes = malloc(sizeof *pipes);
  if (pipes) {
    pipes->to = to, pipes->from = from;
    pthread_mutex_init(&pipes->turn, NULL);
  }
  return (mlx_h2o_seal){sizeof(mlx_h2o_seal), pipes,        pipes_release, pipes_open, free,
                        pipes_encrypt,        pipes_decrypt};
}
