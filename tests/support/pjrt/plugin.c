/* A PJRT plugin that has nothing to do with stretto, for tests of engines `pjrt:`.
 *
 * Its devices are far from the host: arrays live in a process of their own (device.py), which compiles and
 * computes, and are reached through two pipes. Whatever is asked for is put into a queue, which a thread sends off one
 * by one, so arrays are pending when the caller gets them, and errors of computations come late. Of the C API it has
 * what it announces, version 0.MINOR, and of that only what a client cannot do without: no serialization, no layouts,
 * no raw buffers, no pointers, no analyses, no asynchronous transfers.
 *
 * Options of the client: `python` and `device`, the command and the script of the other process; `devices`, how
 * many there are (1); `platform`, its name ("far").
 *
 * The header has the C API's structs and PJRT_Api, all pointers void*. It ends there; functions that are absent here
 * are null.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>
#include "pjrt_abi.h"

enum { INVALID_ARGUMENT = 3, UNIMPLEMENTED = 12, INTERNAL = 13, UNAVAILABLE = 14 };
enum { COMPILE, PUT, RUN, GET, FREE, COPY };
enum { MOST_DEVICES = 16, MOST_RANK = 32, MINOR = 72 };

typedef struct {
    int code;
    char message[4096];
} Error;

/* What becomes true once: a request has been answered. */
typedef struct Done {
    int references, over;
    Error error; /* code 0 without one */
    struct Waiter {
        void (*call)(void *error, void *argument);
        void *argument;
        struct Waiter *next;
    } * waiters;
} Done;

typedef struct Request {
    uint32_t kind;
    uint64_t size, room;
    char *bytes;
    Done *done;
    void *answer;       /* where what comes back is put; for COMPILE a char** */
    uint64_t *answered; /* its size */
    uint64_t most;
    struct Request *next;
} Request;

typedef struct {
    struct Client *client;
    int id;
    char text[80];
} Device; /* PJRT_Device, PJRT_DeviceDescription and PJRT_Memory alike */

typedef struct Client {
    int to, from, devices;
    pid_t process;
    char platform[64];
    Device device[MOST_DEVICES];
    void *list[MOST_DEVICES];
    uint64_t names; /* of arrays, the last one given */
    Request *first, *last;
    int closing;
    pthread_t thread;
} Client;

typedef struct {
    Client *client;
    Device *device;
    uint64_t name;
    int type, rank, deleted;
    int64_t dims[MOST_RANK];
    uint64_t bytes;
    Done *ready;
} Buffer;

typedef struct {
    Client *client;
    Device *device;
    uint32_t number;
    int references, outputs, donors, deleted;
    int *types, *donated;
    int64_t *dims;
    size_t *ranks;
    uint64_t *bytes;
    const char **kinds;
    size_t *kind_sizes;
    char name[64];
} Executable;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t news = PTHREAD_COND_INITIALIZER;
static const char *const KIND = "device", *const VERSION = "far away 1";

#define ENTRY(name) static void *name##_(name##_Args *a)

static Error *fail(int code, const char *form, ...) {
    Error *made = calloc(1, sizeof *made);
    va_list given;
    va_start(given, form);
    vsnprintf(made->message, sizeof made->message, form, given);
    va_end(given);
    made->code = code;
    return made;
}
static Error *same(const Error *error) { return error->code ? fail(error->code, "%s", error->message) : NULL; }

ENTRY(PJRT_Error_Destroy) { return free(a->error), NULL; }
ENTRY(PJRT_Error_Message) {
    a->message = ((Error *)a->error)->message;
    a->message_size = strlen(a->message);
    return NULL;
}
ENTRY(PJRT_Error_GetCode) { return a->code = ((Error *)a->error)->code, NULL; }
ENTRY(PJRT_Plugin_Initialize) { return (void)a, NULL; }
ENTRY(PJRT_Plugin_Attributes) { return a->attributes = NULL, a->num_attributes = 0, NULL; }

/* Events are references to what will be done. */

static Done *done_new(int references) {
    Done *done = calloc(1, sizeof *done);
    done->references = references;
    return done;
}
static Done *keep(Done *done) {
    pthread_mutex_lock(&lock);
    done->references++;
    pthread_mutex_unlock(&lock);
    return done;
}
static void drop(Done *done) {
    pthread_mutex_lock(&lock);
    int left = --done->references;
    pthread_mutex_unlock(&lock);
    if (!left) free(done);
}
static void finish(Done *done, int code, const char *message, size_t size) {
    pthread_mutex_lock(&lock);
    done->error.code = code;
    if (size >= sizeof done->error.message) size = sizeof done->error.message - 1;
    memcpy(done->error.message, message, size);
    done->over = 1;
    struct Waiter *waiter = done->waiters;
    done->waiters = NULL;
    pthread_cond_broadcast(&news);
    pthread_mutex_unlock(&lock);
    while (waiter) {
        struct Waiter *next = waiter->next;
        waiter->call(same(&done->error), waiter->argument);
        free(waiter);
        waiter = next;
    }
    drop(done);
}
static void await(Done *done) {
    pthread_mutex_lock(&lock);
    while (!done->over) pthread_cond_wait(&news, &lock);
    pthread_mutex_unlock(&lock);
}
ENTRY(PJRT_Event_Destroy) { return drop(a->event), NULL; }
ENTRY(PJRT_Event_IsReady) {
    pthread_mutex_lock(&lock);
    a->is_ready = ((Done *)a->event)->over;
    pthread_mutex_unlock(&lock);
    return NULL;
}
ENTRY(PJRT_Event_Error) { return same(&((Done *)a->event)->error); }
ENTRY(PJRT_Event_Await) { return await(a->event), same(&((Done *)a->event)->error); }
ENTRY(PJRT_Event_OnReady) {
    Done *done = a->event;
    void (*call)(void *, void *) = (void (*)(void *, void *))a->callback;
    pthread_mutex_lock(&lock);
    int over = done->over;
    if (!over) {
        struct Waiter *waiter = malloc(sizeof *waiter);
        *waiter = (struct Waiter){call, a->user_arg, done->waiters};
        done->waiters = waiter;
    }
    pthread_mutex_unlock(&lock);
    if (over) call(same(&done->error), a->user_arg);
    return NULL;
}

/* Requests. */

static Request *request(uint32_t kind) {
    Request *made = calloc(1, sizeof *made);
    made->kind = kind;
    return made;
}
static void add(Request *to, const void *bytes, uint64_t size) {
    if (to->size + size > to->room) to->bytes = realloc(to->bytes, to->room = 2 * (to->size + size));
    memcpy(to->bytes + to->size, bytes, size);
    to->size += size;
}
static void add_number(Request *to, int64_t number) { add(to, &number, sizeof number); }

/* Send it in its turn. Takes the request, and one reference to what is done then. */
static void enqueue(Client *client, Request *sent, Done *done) {
    sent->done = done;
    pthread_mutex_lock(&lock);
    if (client->last) client->last->next = sent;
    else client->first = sent;
    client->last = sent;
    pthread_cond_broadcast(&news);
    pthread_mutex_unlock(&lock);
}
static int move(ssize_t (*how)(int, void *, size_t), int file, void *bytes, uint64_t size) {
    for (uint64_t at = 0; at < size;) {
        ssize_t moved = how(file, (char *)bytes + at, size - at);
        if (moved < 0 && errno == EINTR) continue;
        if (moved <= 0) return 0;
        at += (uint64_t)moved;
    }
    return 1;
}
static ssize_t writing(int file, void *bytes, size_t size) { return write(file, bytes, size); }

static void *serve(void *argument) {
    Client *client = argument;
    for (;;) {
        pthread_mutex_lock(&lock);
        while (!client->first && !client->closing) pthread_cond_wait(&news, &lock);
        Request *next = client->first;
        if (next && !(client->first = next->next)) client->last = NULL;
        pthread_mutex_unlock(&lock);
        if (!next) return NULL;
        uint64_t head[2] = {next->kind, next->size};
        uint64_t back[2] = {UNAVAILABLE, 0}; /* a code and a size */
        char *text = NULL;
        int alive = move(writing, client->to, head, sizeof head) && move(writing, client->to, next->bytes, next->size) &&
                    move(read, client->from, back, sizeof back);
        if (alive && back[1] && !back[0] && next->kind == GET && back[1] == next->most) {
            alive = move(read, client->from, next->answer, back[1]);
        } else if (alive) {
            text = calloc(1, back[1] + 1);
            alive = move(read, client->from, text, back[1]);
        }
        if (!alive) finish(next->done, UNAVAILABLE, "the device is gone", strlen("the device is gone"));
        else if (back[0]) finish(next->done, (int)back[0], text, back[1]);
        else {
            if (next->kind == COMPILE) *(char **)next->answer = text, text = NULL, *next->answered = back[1];
            finish(next->done, 0, "", 0);
        }
        free(text);
        free(next->bytes);
        free(next);
    }
}

/* The client, its devices and their memories. */

static const char *option(PJRT_Client_Create_Args *a, const char *name, int64_t *number) {
    PJRT_NamedValue *given = a->create_options;
    for (size_t i = 0; i < a->num_options; i++) {
        if (strlen(name) != given[i].name_size || memcmp(given[i].name, name, given[i].name_size)) continue;
        if (number && given[i].type == 1) *number = given[i].value.int64_value;
        if (!number && given[i].type == 0) return strndup(given[i].value.string_value, given[i].value_size);
    }
    return NULL;
}

ENTRY(PJRT_Client_Create) {
    const char *python = option(a, "python", NULL), *script = option(a, "device", NULL);
    const char *platform = option(a, "platform", NULL);
    int64_t devices = 1;
    option(a, "devices", &devices);
    if (!python || !script) return fail(INVALID_ARGUMENT, "options `python` and `device` are missing");
    if (devices < 1 || devices > MOST_DEVICES) return fail(INVALID_ARGUMENT, "%ld devices", (long)devices);
    int to[2], from[2];
    if (pipe2(to, O_CLOEXEC) || pipe2(from, O_CLOEXEC)) return fail(INTERNAL, "pipe: %s", strerror(errno));
    char count[16];
    snprintf(count, sizeof count, "%ld", (long)devices);
    pid_t process = fork();
    if (process < 0) return fail(INTERNAL, "fork: %s", strerror(errno));
    if (!process) {
        dup2(to[0], 0);
        dup2(from[1], 1);
        execlp(python, python, script, count, (char *)NULL);
        _exit(127);
    }
    close(to[0]);
    close(from[1]);
    Client *client = calloc(1, sizeof *client);
    client->to = to[1], client->from = from[0], client->devices = (int)devices, client->process = process;
    snprintf(client->platform, sizeof client->platform, "%s", platform ? platform : "far");
    for (int i = 0; i < devices; i++) {
        client->device[i] = (Device){.client = client, .id = i};
        snprintf(client->device[i].text, sizeof client->device[i].text, "%s:%d", client->platform, i);
        client->list[i] = &client->device[i];
    }
    pthread_create(&client->thread, NULL, serve, client);
    a->client = client;
    return NULL;
}
ENTRY(PJRT_Client_Destroy) {
    Client *client = a->client;
    pthread_mutex_lock(&lock);
    client->closing = 1;
    pthread_cond_broadcast(&news);
    pthread_mutex_unlock(&lock);
    pthread_join(client->thread, NULL);
    close(client->to);
    close(client->from);
    waitpid(client->process, NULL, 0);
    free(client);
    return NULL;
}
#define TEXT(entry, from, field, text) \
    ENTRY(entry) { return (void)(a->from), a->field = (text), a->field##_size = strlen(a->field), NULL; }
TEXT(PJRT_Client_PlatformName, client, platform_name, ((Client *)a->client)->platform)
TEXT(PJRT_Client_PlatformVersion, client, platform_version, VERSION)
TEXT(PJRT_DeviceDescription_Kind, device_description, device_kind, "far device")
TEXT(PJRT_DeviceDescription_DebugString, device_description, debug_string, ((Device *)a->device_description)->text)
TEXT(PJRT_DeviceDescription_ToString, device_description, to_string, ((Device *)a->device_description)->text)
TEXT(PJRT_Memory_Kind, memory, kind, KIND)
TEXT(PJRT_Memory_DebugString, memory, debug_string, ((Device *)a->memory)->text)
TEXT(PJRT_Memory_ToString, memory, to_string, ((Device *)a->memory)->text)
TEXT(PJRT_Executable_Name, executable, executable_name, ((Executable *)a->executable)->name)

ENTRY(PJRT_Client_ProcessIndex) { return a->process_index = 0, NULL; }
ENTRY(PJRT_Client_Devices) {
    Client *client = a->client;
    return a->devices = client->list, a->num_devices = (size_t)client->devices, NULL;
}
ENTRY(PJRT_Client_AddressableDevices) {
    Client *client = a->client;
    return a->addressable_devices = client->list, a->num_addressable_devices = (size_t)client->devices, NULL;
}
ENTRY(PJRT_Client_AddressableMemories) {
    Client *client = a->client;
    return a->addressable_memories = client->list, a->num_addressable_memories = (size_t)client->devices, NULL;
}
static Error *look_up(Client *client, int id, void **found) {
    if (id < 0 || id >= client->devices) return fail(INVALID_ARGUMENT, "there is no device %d", id);
    return *found = &client->device[id], NULL;
}
ENTRY(PJRT_Client_LookupDevice) { return look_up(a->client, a->id, &a->device); }
ENTRY(PJRT_Client_LookupAddressableDevice) { return look_up(a->client, a->local_hardware_id, &a->addressable_device); }
ENTRY(PJRT_Client_DefaultDeviceAssignment) {
    for (int i = 0; i < a->num_replicas * a->num_partitions; i++) ((int *)a->default_assignment)[i] = i;
    return NULL;
}
ENTRY(PJRT_DeviceDescription_Id) { return a->id = ((Device *)a->device_description)->id, NULL; }
ENTRY(PJRT_DeviceDescription_ProcessIndex) { return a->process_index = 0, NULL; }
ENTRY(PJRT_DeviceDescription_Attributes) { return a->attributes = NULL, a->num_attributes = 0, NULL; }
ENTRY(PJRT_Device_GetDescription) { return a->device_description = a->device, NULL; }
ENTRY(PJRT_Device_IsAddressable) { return a->is_addressable = true, NULL; }
ENTRY(PJRT_Device_LocalHardwareId) { return a->local_hardware_id = ((Device *)a->device)->id, NULL; }
ENTRY(PJRT_Device_AddressableMemories) {
    Device *device = a->device;
    return a->memories = &device->client->list[device->id], a->num_memories = 1, NULL;
}
ENTRY(PJRT_Device_DefaultMemory) { return a->memory = a->device, NULL; }
ENTRY(PJRT_Memory_Id) { return a->id = ((Device *)a->memory)->id, NULL; }
ENTRY(PJRT_Memory_Kind_Id) { return a->kind_id = 7, NULL; }
ENTRY(PJRT_Memory_AddressableByDevices) {
    Device *device = a->memory;
    return a->devices = &device->client->list[device->id], a->num_devices = 1, NULL;
}

/* A topology is the client. */
ENTRY(PJRT_Client_TopologyDescription) { return a->topology = a->client, NULL; }
ENTRY(PJRT_TopologyDescription_Destroy) { return (void)a, NULL; }
TEXT(PJRT_TopologyDescription_PlatformName, topology, platform_name, ((Client *)a->topology)->platform)
TEXT(PJRT_TopologyDescription_PlatformVersion, topology, platform_version, VERSION)
ENTRY(PJRT_TopologyDescription_GetDeviceDescriptions) {
    Client *client = a->topology;
    return a->descriptions = client->list, a->num_descriptions = (size_t)client->devices, NULL;
}
ENTRY(PJRT_TopologyDescription_Attributes) { return a->attributes = NULL, a->num_attributes = 0, NULL; }

/* Executables. The device is in the options, as protocol buffers have it: a field's key, then its number or length. */

static uint64_t number_at(const uint8_t **at, const uint8_t *end) {
    uint64_t found = 0;
    for (int shift = 0; *at < end; shift += 7) {
        uint8_t byte = *(*at)++;
        found |= (uint64_t)(byte & 127) << shift;
        if (byte < 128) break;
    }
    return found;
}
/* The last field of this number: its bytes, or where it has none its value. */
static int field(const uint8_t *at, const uint8_t *end, uint64_t number, const uint8_t **bytes, uint64_t *value) {
    int found = 0;
    while (at < end) {
        uint64_t key = number_at(&at, end), size = 0;
        if ((key & 7) == 0) size = number_at(&at, end);
        if (key >> 3 == number) found = 1, *value = size;
        if ((key & 7) == 1) at += 8;
        if ((key & 7) == 5) at += 4;
        if ((key & 7) == 2) {
            size = number_at(&at, end);
            if (key >> 3 == number) *bytes = at, *value = size;
            at += size;
        }
    }
    return found;
}
static int device_of(const void *options, size_t size) {
    const uint8_t *at = options, *end = at + size;
    uint64_t value = size;
    /* CompileOptionsProto.executable_build_options.device_assignment.computation_devices[0].replica_device_ids */
    for (int step = 0; step < 4; step++) {
        static const uint64_t path[] = {3, 9, 3, 1};
        if (!field(at, end, path[step], &at, &value)) return 0;
        end = at + value;
    }
    return end > at ? (int)number_at(&at, end) : (int)value;
}

ENTRY(PJRT_Client_Compile) {
    Client *client = a->client;
    PJRT_Program *program = a->program;
    if (program->format_size != 4 || memcmp(program->format, "mlir", 4))
        return fail(UNIMPLEMENTED, "programs of format %.*s", (int)program->format_size, program->format);
    int device = device_of(a->compile_options, a->compile_options_size);
    if (device < 0 || device >= client->devices) return fail(INVALID_ARGUMENT, "there is no device %d", device);
    char *answer = NULL;
    uint64_t size = 0;
    Request *sent = request(COMPILE);
    add(sent, program->code, program->code_size);
    sent->answer = &answer, sent->answered = &size;
    Done *done = done_new(2);
    enqueue(client, sent, done);
    await(done);
    Error *error = same(&done->error);
    drop(done);
    if (error) return error;
    /* Its number, how many inputs are donated, which; how many outputs; type, bytes, rank and dimensions of each. */
    int64_t *at = (int64_t *)answer;
    Executable *made = calloc(1, sizeof *made);
    made->client = client, made->device = &client->device[device], made->references = 1;
    made->number = (uint32_t)*at++;
    made->donors = (int)*at++;
    made->donated = calloc((size_t)made->donors + 1, sizeof(int));
    for (int i = 0; i < made->donors; i++) made->donated[i] = (int)*at++;
    made->outputs = (int)*at++;
    size_t most = (size_t)made->outputs + 1;
    made->types = calloc(most, sizeof(int)), made->ranks = calloc(most, sizeof(size_t));
    made->dims = calloc(most * MOST_RANK, sizeof(int64_t)), made->bytes = calloc(most, sizeof(uint64_t));
    made->kinds = calloc(most, sizeof(char *)), made->kind_sizes = calloc(most, sizeof(size_t));
    int64_t *dim = made->dims;
    for (int i = 0; i < made->outputs; i++) {
        made->types[i] = (int)*at++, made->bytes[i] = (uint64_t)*at++, made->ranks[i] = (size_t)*at++;
        for (size_t k = 0; k < made->ranks[i]; k++) *dim++ = *at++;
        made->kinds[i] = KIND, made->kind_sizes[i] = strlen(KIND);
    }
    snprintf(made->name, sizeof made->name, "program %u", made->number);
    free(answer);
    a->executable = made;
    return NULL;
}
static void release(Executable *executable) {
    pthread_mutex_lock(&lock);
    int left = --executable->references;
    pthread_mutex_unlock(&lock);
    if (left) return;
    free(executable->types), free(executable->donated), free(executable->dims), free(executable->ranks);
    free(executable->bytes), free(executable->kinds), free(executable->kind_sizes), free(executable);
}
ENTRY(PJRT_Executable_Destroy) { return release(a->executable), NULL; }
ENTRY(PJRT_LoadedExecutable_Destroy) { return release(a->executable), NULL; }
ENTRY(PJRT_LoadedExecutable_GetExecutable) {
    Executable *executable = a->loaded_executable;
    pthread_mutex_lock(&lock);
    executable->references++;
    pthread_mutex_unlock(&lock);
    return a->executable = executable, NULL;
}
ENTRY(PJRT_LoadedExecutable_AddressableDevices) {
    Executable *executable = a->executable;
    a->addressable_devices = &executable->client->list[executable->device->id];
    return a->num_addressable_devices = 1, NULL;
}
ENTRY(PJRT_LoadedExecutable_Delete) { return ((Executable *)a->executable)->deleted = 1, NULL; }
ENTRY(PJRT_LoadedExecutable_IsDeleted) { return a->is_deleted = ((Executable *)a->executable)->deleted, NULL; }
ENTRY(PJRT_Executable_NumReplicas) { return a->num_replicas = 1, NULL; }
ENTRY(PJRT_Executable_NumPartitions) { return a->num_partitions = 1, NULL; }
ENTRY(PJRT_Executable_NumOutputs) { return a->num_outputs = (size_t)((Executable *)a->executable)->outputs, NULL; }
ENTRY(PJRT_Executable_SizeOfGeneratedCodeInBytes) { return a->size_in_bytes = -1, NULL; }
ENTRY(PJRT_Executable_OutputElementTypes) {
    Executable *executable = a->executable;
    return a->output_types = executable->types, a->num_output_types = (size_t)executable->outputs, NULL;
}
ENTRY(PJRT_Executable_OutputDimensions) {
    Executable *executable = a->executable;
    a->num_outputs = (size_t)executable->outputs;
    return a->dims = executable->dims, a->dim_sizes = executable->ranks, NULL;
}
ENTRY(PJRT_Executable_OutputMemoryKinds) {
    Executable *executable = a->executable;
    a->num_outputs = (size_t)executable->outputs;
    return a->memory_kinds = executable->kinds, a->memory_kind_sizes = executable->kind_sizes, NULL;
}

static Buffer *buffer(Device *device, int type, int rank, const int64_t *dims, uint64_t bytes, Done *ready) {
    Buffer *made = calloc(1, sizeof *made);
    made->client = device->client, made->device = device, made->type = type, made->rank = rank;
    made->bytes = bytes, made->ready = ready;
    if (rank) memcpy(made->dims, dims, (size_t)rank * sizeof *dims);
    pthread_mutex_lock(&lock);
    made->name = ++device->client->names;
    pthread_mutex_unlock(&lock);
    return made;
}
static void forget(Buffer *gone) {
    pthread_mutex_lock(&lock);
    int before = gone->deleted;
    gone->deleted = 1;
    pthread_mutex_unlock(&lock);
    if (before) return;
    Request *sent = request(FREE);
    add_number(sent, (int64_t)gone->name);
    enqueue(gone->client, sent, done_new(1));
}

ENTRY(PJRT_LoadedExecutable_Execute) {
    Executable *executable = a->executable;
    PJRT_ExecuteOptions *options = a->options;
    if (a->num_devices != 1) return fail(UNIMPLEMENTED, "runs on several devices at once");
    Buffer **inputs = ((Buffer ***)a->argument_lists)[0];
    void **outputs = ((void ***)a->output_lists)[0];
    for (size_t i = 0; i < a->num_args; i++)
        if (inputs[i]->deleted) return fail(INVALID_ARGUMENT, "input %zu has been deleted or donated", i);
    Request *sent = request(RUN);
    add_number(sent, executable->number), add_number(sent, executable->device->id);
    add_number(sent, (int64_t)a->num_args);
    for (size_t i = 0; i < a->num_args; i++) add_number(sent, (int64_t)inputs[i]->name);
    Done *done = done_new(1 + executable->outputs + (a->device_complete_events != NULL));
    int64_t *dims = executable->dims;
    for (int i = 0; i < executable->outputs; i++) {
        int rank = (int)executable->ranks[i];
        Buffer *made = buffer(executable->device, executable->types[i], rank, dims, executable->bytes[i], done);
        dims += rank;
        add_number(sent, (int64_t)made->name);
        outputs[i] = made;
    }
    if (a->device_complete_events) ((void **)a->device_complete_events)[0] = done;
    enqueue(executable->client, sent, done);
    for (int i = 0; i < executable->donors; i++) {
        int kept = 0;
        for (size_t k = 0; k < options->num_non_donatable_input_indices; k++)
            kept |= ((int64_t *)options->non_donatable_input_indices)[k] == executable->donated[i];
        if (!kept) forget(inputs[executable->donated[i]]);
    }
    return NULL;
}

/* Arrays. */

static int width(int type) { /* as the host has them; in the order of PJRT_Buffer_Type */
    static const int widths[] = {0, 1, 1, 2, 4, 8, 1, 2, 4, 8, 2, 4, 8, 2, 8, 16, 1, 1, 1, 1, 1, 1, 1, 0, 1, 1, 1, 1, 1, 1};
    return type > 0 && type < (int)(sizeof widths / sizeof *widths) ? widths[type] : 0;
}
static void gather(Request *to, const char *from, int rank, const int64_t *dims, const int64_t *strides, uint64_t size) {
    if (!rank) {
        add(to, from, size);
        return;
    }
    for (int64_t i = 0; i < dims[0]; i++) gather(to, from + i * strides[0], rank - 1, dims + 1, strides + 1, size);
}
ENTRY(PJRT_Client_BufferFromHostBuffer) {
    uint64_t each = (uint64_t)width(a->type), bytes = each;
    int rank = (int)a->num_dims, dense = 1;
    const int64_t *dims = a->dims, *strides = a->byte_strides;
    if (!each) return fail(UNIMPLEMENTED, "arrays of type %d", a->type);
    if (rank > MOST_RANK) return fail(UNIMPLEMENTED, "arrays of rank %d", rank);
    if (!a->device && !a->memory) return fail(INVALID_ARGUMENT, "neither a device nor a memory");
    for (int i = rank - 1; i >= 0; i--) {
        if (a->num_byte_strides && dims[i] > 1) dense &= strides[i] == (int64_t)bytes;
        bytes *= (uint64_t)dims[i];
    }
    Done *done = done_new(2);
    Buffer *made = buffer(a->device ? a->device : a->memory, a->type, rank, dims, bytes, done);
    Request *sent = request(PUT);
    add_number(sent, (int64_t)made->name), add_number(sent, made->device->id);
    add_number(sent, a->type), add_number(sent, rank);
    if (rank) add(sent, dims, (uint64_t)rank * sizeof *dims);
    if (dense) add(sent, a->data, bytes);
    else if (bytes) gather(sent, a->data, rank, dims, strides, each);
    enqueue(made->client, sent, done);
    Done *copied = done_new(2);
    finish(copied, 0, "", 0);
    a->done_with_host_buffer = copied;
    a->buffer = made;
    return NULL;
}
ENTRY(PJRT_Buffer_Destroy) {
    Buffer *gone = a->buffer;
    forget(gone);
    drop(gone->ready);
    free(gone);
    return NULL;
}
ENTRY(PJRT_Buffer_Delete) { return forget(a->buffer), NULL; }
ENTRY(PJRT_Buffer_IsDeleted) { return a->is_deleted = ((Buffer *)a->buffer)->deleted, NULL; }
ENTRY(PJRT_Buffer_ElementType) { return a->type = ((Buffer *)a->buffer)->type, NULL; }
ENTRY(PJRT_Buffer_Dimensions) {
    Buffer *of = a->buffer;
    return a->dims = of->dims, a->num_dims = (size_t)of->rank, NULL;
}
ENTRY(PJRT_Buffer_UnpaddedDimensions) {
    Buffer *of = a->buffer;
    return a->unpadded_dims = of->dims, a->num_dims = (size_t)of->rank, NULL;
}
ENTRY(PJRT_Buffer_DynamicDimensionIndices) {
    return a->dynamic_dim_indices = NULL, a->num_dynamic_dims = 0, NULL;
}
ENTRY(PJRT_Buffer_OnDeviceSizeInBytes) { return a->on_device_size_in_bytes = ((Buffer *)a->buffer)->bytes, NULL; }
ENTRY(PJRT_Buffer_Device) { return a->device = ((Buffer *)a->buffer)->device, NULL; }
ENTRY(PJRT_Buffer_Memory) { return a->memory = ((Buffer *)a->buffer)->device, NULL; }
ENTRY(PJRT_Buffer_IsOnCpu) { return a->is_on_cpu = false, NULL; }
ENTRY(PJRT_Buffer_ReadyEvent) { return a->event = keep(((Buffer *)a->buffer)->ready), NULL; }
ENTRY(PJRT_Buffer_ToHostBuffer) {
    Buffer *of = a->src;
    if (of->deleted) return fail(INVALID_ARGUMENT, "the array has been deleted or donated");
    if (!a->dst) return a->dst_size = of->bytes, NULL;
    if (a->dst_size < of->bytes) return fail(INVALID_ARGUMENT, "%zu bytes for %lu", a->dst_size, (long)of->bytes);
    PJRT_Buffer_MemoryLayout *layout = a->host_layout;
    if (layout && layout->type == 0)
        for (int i = 0; i < of->rank; i++)
            if (((int64_t *)layout->layout.tiled.minor_to_major)[i] != of->rank - 1 - i)
                return fail(UNIMPLEMENTED, "other layouts than row-major");
    Request *sent = request(GET);
    add_number(sent, (int64_t)of->name);
    sent->answer = a->dst, sent->most = of->bytes;
    Done *done = done_new(2);
    a->event = done;
    enqueue(of->client, sent, done);
    return NULL;
}
static Error *copy(Buffer *of, Device *device, void **made) {
    if (of->deleted) return fail(INVALID_ARGUMENT, "the array has been deleted or donated");
    Done *done = done_new(2);
    Buffer *copied = buffer(device, of->type, of->rank, of->dims, of->bytes, done);
    Request *sent = request(COPY);
    add_number(sent, (int64_t)of->name), add_number(sent, (int64_t)copied->name), add_number(sent, device->id);
    enqueue(of->client, sent, done);
    return *made = copied, NULL;
}
ENTRY(PJRT_Buffer_CopyToDevice) { return copy(a->buffer, a->dst_device, &a->dst_buffer); }
ENTRY(PJRT_Buffer_CopyToMemory) { return copy(a->buffer, a->dst_memory, &a->dst_buffer); }

/* What a client may ask for without looking whether it is there. */
#define LACKS(name) ENTRY(name) { return (void)a, fail(UNIMPLEMENTED, "no " #name " here"); }
LACKS(PJRT_Device_MemoryStats)
LACKS(PJRT_Executable_OptimizedProgram)
LACKS(PJRT_Executable_Fingerprint)
LACKS(PJRT_Executable_GetCostAnalysis)
LACKS(PJRT_Executable_GetCompiledMemoryStats)
LACKS(PJRT_Executable_Serialize)
LACKS(PJRT_Executable_DeserializeAndLoad)
LACKS(PJRT_Buffer_UnsafePointer)
LACKS(PJRT_Buffer_GetMemoryLayout)

#define HAS(name) {#name, offsetof(PJRT_Api, name), (void *(*)(void *))name##_}
static const struct {
    const char *name;
    size_t place;
    void *(*function)(void *);
} functions[] = {
    HAS(PJRT_Error_Destroy), HAS(PJRT_Error_Message), HAS(PJRT_Error_GetCode), HAS(PJRT_Plugin_Initialize),
    HAS(PJRT_Plugin_Attributes), HAS(PJRT_Event_Destroy), HAS(PJRT_Event_IsReady), HAS(PJRT_Event_Error),
    HAS(PJRT_Event_Await), HAS(PJRT_Event_OnReady), HAS(PJRT_Client_Create), HAS(PJRT_Client_Destroy),
    HAS(PJRT_Client_PlatformName), HAS(PJRT_Client_PlatformVersion), HAS(PJRT_Client_ProcessIndex),
    HAS(PJRT_Client_Devices), HAS(PJRT_Client_AddressableDevices), HAS(PJRT_Client_AddressableMemories),
    HAS(PJRT_Client_LookupDevice), HAS(PJRT_Client_LookupAddressableDevice), HAS(PJRT_Client_DefaultDeviceAssignment),
    HAS(PJRT_Client_Compile), HAS(PJRT_Client_BufferFromHostBuffer), HAS(PJRT_DeviceDescription_Id),
    HAS(PJRT_DeviceDescription_ProcessIndex), HAS(PJRT_DeviceDescription_Attributes),
    HAS(PJRT_DeviceDescription_Kind), HAS(PJRT_DeviceDescription_DebugString), HAS(PJRT_DeviceDescription_ToString),
    HAS(PJRT_Device_GetDescription), HAS(PJRT_Device_IsAddressable), HAS(PJRT_Device_LocalHardwareId),
    HAS(PJRT_Device_AddressableMemories), HAS(PJRT_Device_MemoryStats), HAS(PJRT_Device_DefaultMemory),
    HAS(PJRT_Memory_Id), HAS(PJRT_Memory_Kind), HAS(PJRT_Memory_Kind_Id), HAS(PJRT_Memory_DebugString),
    HAS(PJRT_Memory_ToString), HAS(PJRT_Memory_AddressableByDevices), HAS(PJRT_Client_TopologyDescription),
    HAS(PJRT_TopologyDescription_Destroy), HAS(PJRT_TopologyDescription_PlatformName),
    HAS(PJRT_TopologyDescription_PlatformVersion), HAS(PJRT_TopologyDescription_GetDeviceDescriptions),
    HAS(PJRT_TopologyDescription_Attributes), HAS(PJRT_Executable_Destroy), HAS(PJRT_Executable_Name),
    HAS(PJRT_Executable_NumReplicas), HAS(PJRT_Executable_NumPartitions), HAS(PJRT_Executable_NumOutputs),
    HAS(PJRT_Executable_SizeOfGeneratedCodeInBytes), HAS(PJRT_Executable_OutputElementTypes),
    HAS(PJRT_Executable_OutputDimensions), HAS(PJRT_Executable_OutputMemoryKinds),
    HAS(PJRT_Executable_OptimizedProgram), HAS(PJRT_LoadedExecutable_Destroy),
    HAS(PJRT_LoadedExecutable_GetExecutable), HAS(PJRT_LoadedExecutable_AddressableDevices),
    HAS(PJRT_LoadedExecutable_Delete), HAS(PJRT_LoadedExecutable_IsDeleted), HAS(PJRT_LoadedExecutable_Execute),
    HAS(PJRT_Buffer_Destroy), HAS(PJRT_Buffer_Delete), HAS(PJRT_Buffer_IsDeleted), HAS(PJRT_Buffer_ElementType),
    HAS(PJRT_Buffer_Dimensions), HAS(PJRT_Buffer_UnpaddedDimensions), HAS(PJRT_Buffer_DynamicDimensionIndices),
    HAS(PJRT_Buffer_OnDeviceSizeInBytes), HAS(PJRT_Buffer_Device), HAS(PJRT_Buffer_Memory), HAS(PJRT_Buffer_IsOnCpu),
    HAS(PJRT_Buffer_ReadyEvent), HAS(PJRT_Buffer_ToHostBuffer), HAS(PJRT_Buffer_CopyToDevice),
    HAS(PJRT_Buffer_CopyToMemory), HAS(PJRT_Executable_Fingerprint), HAS(PJRT_Executable_GetCostAnalysis),
    HAS(PJRT_Executable_GetCompiledMemoryStats), HAS(PJRT_Executable_Serialize),
    HAS(PJRT_Executable_DeserializeAndLoad), HAS(PJRT_Buffer_UnsafePointer), HAS(PJRT_Buffer_GetMemoryLayout),
};

/* FAR_LACKS in the environment names functions that are not there. */
const PJRT_Api *GetPjrtApi(void) {
    static PJRT_Api api = {
        .struct_size = offsetof(PJRT_Api, PJRT_Client_CreateAliasBuffer), /* what later versions added is not there */
        .pjrt_api_version = {.struct_size = sizeof(PJRT_Api_Version), .minor_version = MINOR},
    };
    const char *lacks = getenv("FAR_LACKS");
    for (size_t i = 0; i < sizeof functions / sizeof *functions; i++)
        if (!lacks || !strstr(lacks, functions[i].name)) *(void *(**)(void *))((char *)&api + functions[i].place) = functions[i].function;
    return &api;
}
