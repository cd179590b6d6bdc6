#include "cases.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char* const kFormat = "mlx-h2o golden 1";

static void fail(const char* what, const char* which) {
  fprintf(stderr, "replay: %s: %s\n", what, which);
  exit(2);
}

static void* grown(void* memory, size_t count, size_t size) {
  void* more = realloc(memory, count * size);
  if (!more) fail("out of memory", "cases");
  return more;
}

static char* copied(const char* text) {
  char* copy = grown(NULL, strlen(text) + 1, 1);
  return strcpy(copy, text);
}

// Splits "first rest" in place; rest is "" where there is none.
static char* rest_of(char* line) {
  char* space = strchr(line, ' ');
  if (!space) return line + strlen(line);
  *space = '\0';
  return space + 1;
}

static char* read_all(const char* path) {
  FILE* file = fopen(path, "rb");
  if (!file) fail("cannot open", path);
  fseek(file, 0, SEEK_END);
  const long size = ftell(file);
  rewind(file);
  char* text = grown(NULL, (size_t)size + 1, 1);
  if (fread(text, 1, (size_t)size, file) != (size_t)size) fail("cannot read", path);
  text[size] = '\0';
  fclose(file);
  return text;
}

static void read_tolerance(Cases* cases, char* line) {
  char* dtype = line;
  char* end = rest_of(line);
  Tolerance tolerance;
  tolerance.absolute = strtod(end, &end);
  tolerance.relative = strtod(end, &end);
  if (*end) fail("a malformed tolerance of", dtype);
  if (!strcmp(dtype, "float32"))
    cases->float32 = tolerance;
  else if (!strcmp(dtype, "float16"))
    cases->float16 = tolerance;
  else if (!strcmp(dtype, "bfloat16"))
    cases->bfloat16 = tolerance;
  else
    fail("an unknown dtype", dtype);
}

Cases cases_read(const char* path) {
  Cases cases = {0};
  char* text = read_all(path);
  Case* current = NULL;
  size_t number = 0;
  for (char *line = text, *next; *line; line = next, ++number) {
    char* end = strchr(line, '\n');
    if (!end) fail("the last line is cut off", path);
    *end = '\0';
    next = end + 1;
    if (number == 0) {
      if (strcmp(line, kFormat)) fail("not the format \"mlx-h2o golden 1\"", line);
    } else if (!*line) {
      current = NULL;
    } else if (!strncmp(line, "tolerance ", 10) && !current) {
      read_tolerance(&cases, line + 10);
    } else if (!strncmp(line, "case ", 5) && !current) {
      cases.cases = grown(cases.cases, cases.count + 1, sizeof(Case));
      current = &cases.cases[cases.count++];
      char* name = rest_of(line + 5);
      *current = (Case){copied(line + 5), copied(name), NULL, 0};
    } else if (current) {
      current->parameters = grown(current->parameters, current->count + 1, sizeof(Parameter));
      char* value = rest_of(line);
      current->parameters[current->count++] = (Parameter){copied(line), copied(value), false};
    } else {
      fail("a malformed line", line);
    }
  }
  free(text);
  if (!cases.count) fail("no cases in", path);
  return cases;
}

void cases_free(Cases cases) {
  for (size_t i = 0; i < cases.count; ++i) {
    Case* c = &cases.cases[i];
    for (size_t p = 0; p < c->count; ++p) {
      free(c->parameters[p].name);
      free(c->parameters[p].value);
    }
    free(c->parameters);
    free(c->group);
    free(c->name);
  }
  free(cases.cases);
}

const char* text_or_null(Case* c, const char* name) {
  for (size_t p = 0; p < c->count; ++p)
    if (!strcmp(c->parameters[p].name, name)) {
      c->parameters[p].read = true;
      return c->parameters[p].value;
    }
  return NULL;
}

const char* text_of(Case* c, const char* name) {
  const char* value = text_or_null(c, name);
  if (!value) {
    fprintf(stderr, "replay: %s/%s has no parameter %s\n", c->group, c->name, name);
    exit(2);
  }
  return value;
}

int int_of(Case* c, const char* name) {
  return atoi(text_of(c, name));
}

double number_of(Case* c, const char* name) {
  return strtod(text_of(c, name), NULL);
}

bool flag_of(Case* c, const char* name) {
  return !strcmp(text_of(c, name), "true");
}

int* ints_of(Case* c, const char* name, size_t* count) {
  const char* word = text_of(c, name);
  int* numbers = NULL;
  *count = 0;
  while (*word) {
    char* end;
    const long number = strtol(word, &end, 10);
    if (end == word) fail("not whole numbers", word);
    numbers = grown(numbers, *count + 1, sizeof(int));
    numbers[(*count)++] = (int)number;
    word = *end == ' ' ? end + 1 : end;
  }
  return numbers;
}

float* fractions_of(Case* c, const char* name, size_t most) {
  const char* word = text_of(c, name);
  float* numbers = calloc(most, sizeof *numbers);
  size_t count = 0;
  for (char* end; *word; ++count) {
    const double number = strtod(word, &end);
    if (end == word || count == most) fail("not so many fractions", name);
    numbers[count] = (float)number;
    word = *end == ' ' ? end + 1 : end;
  }
  if (count != 1 && count != most) fail("not so many fractions", name);
  for (size_t i = count; i < most; ++i) numbers[i] = numbers[0];
  return numbers;
}

const char* unread(const Case* c) {
  for (size_t p = 0; p < c->count; ++p)
    if (!c->parameters[p].read) return c->parameters[p].name;
  return NULL;
}
