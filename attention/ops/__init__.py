"""Operations over KV and attention's rows. `operation` says what an operation is; each other module is one."""
