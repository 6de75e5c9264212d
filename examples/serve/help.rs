//! What `--help` prints.

/// The options.
pub const TEXT: &str = "\
serve: one engine behind HTTP

    --model DIR              the checkpoint (default: the small model of the repository)
    --name NAME              as /v1/models lists it (default: the directory's name)
    --host ADDRESS           to listen at (127.0.0.1)
    --port N                 8000; 0 picks one
    --token TEXT             what control routes ask for as Authorization: Bearer TEXT
    --weights-root DIR       only weights below it may be named
    --threads N              threads of the engine
    --cuda N                 on GPU N, if built with the feature `cuda`
    --kv-blocks N            blocks of the KV cache
    --max-live-requests N    more are refused
    --drain-seconds N        how long requests may run on after SIGINT or SIGTERM (10)
    --asleep                 start without weights, until they come
    --log LEVEL              error, warn, info or debug, to stderr (info)
    --help                   this
";
