/* An installed flashjit from C: values, refusals with their message, and a call that needs a driver. */
#include <flashjit/flashjit.h>
#include <stdio.h>
#include <string.h>

static int fail(const char* what) {
  fprintf(stderr, "%s: %s\n", what, flashjit_last_error_message());
  return 1;
}

int main(void) {
  printf("flashjit %s\n", flashjit_version());

  flashjit_spec* spec = NULL;
  if (flashjit_spec_create("fp16:d7", &spec) != FLASHJIT_INVALID_ARGUMENT)
    return fail("fp16:d7 was not refused");
  if (strlen(flashjit_last_error_message()) == 0) return fail("a refusal without a message");
  if (flashjit_spec_create("fp16:d64:causal", &spec) != FLASHJIT_OK)
    return fail("fp16:d64:causal was refused");

  const flashjit_options options = {.struct_size = sizeof options, .cache_dir = ""};
  flashjit_runtime* runtime = NULL;
  if (flashjit_runtime_create(&options, &runtime) != FLASHJIT_OK) return fail("no runtime");

  const flashjit_shape shape = {.batch = 1, .heads_q = 2, .heads_kv = 2, .seqlen_q = 128, .seqlen_kv = 128};
  flashjit_device device = {.struct_size = sizeof device};
  if (flashjit_device_of("sm_80", &device) != FLASHJIT_OK) return fail("sm_80 is not known");
  if (flashjit_can(FLASHJIT_FORWARD, spec, &shape, &device) != FLASHJIT_OK) return fail("no kernel on sm_80");
  const flashjit_status status = flashjit_current_device(runtime, &device);
  printf("device: %s %s\n", flashjit_status_name(status), flashjit_last_error_message());
  /* This program makes no context current: with or without a GPU, that is what has to be said. */
  if (status != FLASHJIT_NO_DRIVER && status != FLASHJIT_NO_DEVICE) return fail("an unexpected status");

  flashjit_runtime_destroy(runtime);
  flashjit_spec_destroy(spec);
  return 0;
}
