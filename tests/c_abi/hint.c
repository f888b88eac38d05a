/* What an engine says of a path, in C.
 *
 *     hint FINISHED WAITING MISSING
 *
 * The program ends with the line of the first check that fails. */
#include <kvfs.h>
#include <stdio.h>
#include <string.h>

#define CHECK(condition)                                                       \
    do {                                                                       \
        if (!(condition)) {                                                    \
            fprintf(stderr, "line %d: %s; %s\n", __LINE__, #condition,         \
                    kvfs_last_error());                                        \
            return 1;                                                          \
        }                                                                      \
    } while (0)

int main(int argc, char **argv) {
    CHECK(argc == 4);
    CHECK(kvfs_give_hint(argv[1], KVFS_HINT_FINISHED) == KVFS_STATUS_OK);
    CHECK(kvfs_give_hint(argv[2], KVFS_HINT_FINISHED) == KVFS_STATUS_OK);
    CHECK(kvfs_give_hint(argv[2], KVFS_HINT_WAITING) == KVFS_STATUS_OK);
    CHECK(kvfs_give_hint(argv[3], KVFS_HINT_WAITING) == KVFS_STATUS_MISSING);
    CHECK(strstr(kvfs_last_error(), argv[3]) != NULL);
    CHECK(kvfs_give_hint(argv[1], 2) == KVFS_STATUS_ARGUMENT);
    CHECK(kvfs_give_hint(NULL, KVFS_HINT_WAITING) == KVFS_STATUS_ARGUMENT);
    return 0;
}
