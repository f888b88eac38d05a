/* What an engine asks about many values at once, in C.
 *
 *     many DIRECTORY
 *
 * DIRECTORY has the files "0", "2", "4" up to "98" with their names and a full stop in them, and "large" with 3 MiB of 'x'.
 * The program ends with the line of the first check that fails. */
#include <errno.h>
#include <kvfs.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CHECK(condition)                                                       \
    do {                                                                       \
        if (!(condition)) {                                                    \
            fprintf(stderr, "line %d: %s; %s\n", __LINE__, #condition,         \
                    kvfs_last_error());                                        \
            return 1;                                                          \
        }                                                                      \
    } while (0)

#define COUNT 100
#define LARGE (3u << 20)

int main(int argc, char **argv) {
    static char names[COUNT][4];
    static uint8_t rooms[COUNT][8];
    kvfs_named all[COUNT + 1] = {0};
    CHECK(argc == 2);
    for (size_t i = 0; i < COUNT; i++) {
        snprintf(names[i], sizeof names[i], "%u", (unsigned)i);
        all[i] = (kvfs_named){.size = sizeof *all, .name = names[i], .data = rooms[i], .capacity = 8};
    }
    all[COUNT] = (kvfs_named){.size = sizeof *all, .name = "large"};

    CHECK(kvfs_have_many(argv[1], all, COUNT + 1) == KVFS_STATUS_OK);
    for (size_t i = 0; i < COUNT; i++) {
        CHECK(all[i].found == (i % 2 == 0) && all[i].error == 0);
        CHECK(all[i].length == (i % 2 ? 0 : strlen(names[i]) + 1));
    }
    CHECK(all[COUNT].found == 1 && all[COUNT].length == LARGE);

    CHECK(kvfs_read_many(argv[1], all, COUNT + 1) == KVFS_STATUS_OK);
    for (size_t i = 0; i < COUNT; i++) {
        CHECK(all[i].found == (i % 2 == 0) && all[i].error == 0);
        if (all[i].found) {
            CHECK(memcmp(rooms[i], names[i], all[i].length - 1) == 0);
            CHECK(rooms[i][all[i].length - 1] == '.');
        }
    }
    CHECK(all[COUNT].error == ERANGE && all[COUNT].length == LARGE);
    all[COUNT].data = malloc(LARGE);
    all[COUNT].capacity = LARGE;
    CHECK(all[COUNT].data != NULL);
    CHECK(kvfs_read_many(argv[1], all + COUNT, 1) == KVFS_STATUS_OK);
    CHECK(all[COUNT].error == 0 && all[COUNT].data[0] == 'x' && all[COUNT].data[LARGE - 1] == 'x');
    free(all[COUNT].data);

    CHECK(kvfs_have_many(argv[1], NULL, 0) == KVFS_STATUS_OK);
    CHECK(kvfs_have_many(argv[1], NULL, 1) == KVFS_STATUS_ARGUMENT);
    CHECK(kvfs_have_many(NULL, all, 1) == KVFS_STATUS_ARGUMENT);
    all[0].name = "a/b";
    CHECK(kvfs_read_many(argv[1], all, 1) == KVFS_STATUS_ARGUMENT);
    CHECK(strstr(kvfs_last_error(), "no name of a file") != NULL);
    all[0].name = NULL;
    CHECK(kvfs_have_many(argv[1], all, 1) == KVFS_STATUS_ARGUMENT);
    all[0].name = names[0];
    all[0].data = NULL;
    CHECK(kvfs_read_many(argv[1], all, 1) == KVFS_STATUS_ARGUMENT);
    CHECK(kvfs_have_many("/nowhere/at/all", all, 1) == KVFS_STATUS_OK && all[0].found == 0);
    return 0;
}
