/* An NVTX injection library that writes each range to a file, for tests on a machine without nsys.
 *
 *   cc -shared -fPIC -o nvtx_recorder.so nvtx_recorder.c
 *   NVTX_INJECTION64_PATH=$PWD/nvtx_recorder.so NVTX_RECORD=ranges.txt python program.py
 *
 * Both variables must be set before the process starts. One line an event, in order:
 *
 *   <thread> push <domain> <message>      threads count from 0, as they first push
 *   <thread> pop <domain>                 a domain of none is "-"
 *
 * NVTX calls InitializeInjectionNvtx2 once and hands it a function that returns its tables of
 * function pointers; what is put there is called instead of nothing. The types and numbers below
 * are those of nvToolsExt.h and nvtxDetail/nvtxTypes.h of NVTX 3, written out so that no header is
 * needed.
 */
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { TABLE_OF_CALLBACKS = 1 };              /* nvtxExportTableID */
enum { MODULE_CORE = 1, MODULE_CORE2 = 5 };   /* NvtxCallbackModule */
enum { CORE_PUSH_EX = 8, CORE_PUSH_A = 9, CORE_POP = 11 };
enum { CORE2_PUSH_EX = 4, CORE2_POP = 5, CORE2_REGISTER_STRING_A = 10, CORE2_CREATE_A = 12 };
enum { MESSAGE_ASCII = 1, MESSAGE_REGISTERED = 3 };

typedef struct { /* nvtxEventAttributes_t, version 2 */
    uint16_t version, size;
    uint32_t category;
    int32_t color_type;
    uint32_t color;
    int32_t payload_type, reserved;
    uint64_t payload;
    int32_t message_type;
    union {
        const char *ascii;
        const char *registered; /* what register_string returned */
    } message;
} attributes_t;

typedef struct { /* NvtxExportTableCallbacks */
    size_t size;
    int (*get_module_table)(int module, void ****table, unsigned *num_entries);
} callbacks_t;

static FILE *record;
static int num_threads;
static __thread int thread = -1;

static int this_thread(void) {
    if (thread < 0) thread = __sync_fetch_and_add(&num_threads, 1);
    return thread;
}

static const char *message_of(const attributes_t *attributes) {
    switch (attributes->message_type) {
    case MESSAGE_ASCII: return attributes->message.ascii;
    case MESSAGE_REGISTERED: return attributes->message.registered;
    default: return "?";
    }
}

/* one fprintf a line: stdio locks the file, so lines of several threads do not mix */
static int push(const char *domain, const char *message) {
    fprintf(record, "%d push %s %s\n", this_thread(), domain ? domain : "-", message);
    return 0;
}

static int pop(const char *domain) {
    fprintf(record, "%d pop %s\n", this_thread(), domain ? domain : "-");
    return 0;
}

static int push_a(const char *message) { return push(NULL, message); }
static int push_ex(const attributes_t *attributes) { return push(NULL, message_of(attributes)); }
static int pop_default(void) { return pop(NULL); }
static int domain_push_ex(const char *domain, const attributes_t *attributes) {
    return push(domain, message_of(attributes));
}

/* a domain's handle is its name, a registered string's handle the string */
static const char *create_domain(const char *name) { return strdup(name); }
static const char *register_string(const char *domain, const char *text) {
    (void)domain;
    return strdup(text);
}

typedef struct {
    unsigned entry;
    void *function;
} hook_t;

static void install(const callbacks_t *callbacks, int module, const hook_t *hooks, int num_hooks) {
    void ***table;
    unsigned num_entries;
    if (!callbacks->get_module_table(module, &table, &num_entries)) return;
    for (int i = 0; i < num_hooks; i++)
        if (hooks[i].entry < num_entries) *table[hooks[i].entry] = hooks[i].function;
}

#define INSTALL(module, hooks) install(callbacks, module, hooks, sizeof hooks / sizeof *hooks)

int InitializeInjectionNvtx2(const void *(*get_table)(uint32_t table)) {
    const char *path = getenv("NVTX_RECORD");
    const callbacks_t *callbacks = get_table(TABLE_OF_CALLBACKS);
    if (!path || !callbacks || !(record = fopen(path, "a"))) return 0;
    setvbuf(record, NULL, _IOLBF, BUFSIZ); /* what was written is there if the process dies */
    const hook_t core[] = {
        {CORE_PUSH_EX, push_ex}, {CORE_PUSH_A, push_a}, {CORE_POP, pop_default},
    };
    const hook_t core2[] = {
        {CORE2_PUSH_EX, domain_push_ex},
        {CORE2_POP, pop},
        {CORE2_REGISTER_STRING_A, register_string},
        {CORE2_CREATE_A, create_domain},
    };
    INSTALL(MODULE_CORE, core);
    INSTALL(MODULE_CORE2, core2);
    return 1;
}
