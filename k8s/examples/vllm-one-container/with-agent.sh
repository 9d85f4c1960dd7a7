#!/bin/bash
# with-agent.sh ENGINE [ARGUMENT ...]: run the engine with a gpuagent beside it, and be both's first process.
#
# The engine's end ends the container, with its exit code: the agent, which keeps the engine's GPU memory mapped, goes before
# the next engine starts. The agent's end does not: an engine serves without the cache, and the agent is started again.
# SIGTERM ends the engine first, so that its last stores have somewhere to go, then the agent.
# AGENT_COMMAND is what starts the agent, words separated by blanks.
set -u
read -r -a agent_command <<< "${AGENT_COMMAND:-python3 -m kvpool_gpuagent.main}"
agent_pause_s=${AGENT_PAUSE_S:-2}
agent_wait_s=${AGENT_WAIT_S:-120}
socket=${KVPOOL_GPUAGENT_SOCKET:?where engines find the agent}
stopping=

# A trap interrupts wait, and what wait returns then is the signal's: this returns what the process itself ended with.
wait_for() { # PID
    local code last
    while wait "$1"; code=$?; kill -0 "$1" 2> /dev/null; do :; done
    wait "$1" 2> /dev/null
    last=$?
    ((last == 127)) || code=$last # it ended between the two; 127: reported already
    return "$code"
}

end() { # PID, if there is one
    [[ -z $1 ]] || kill -TERM "$1" 2> /dev/null
}

keep_agent() {
    local agent=
    trap 'stopping=1; end "$agent"' TERM
    while [[ -z $stopping ]]; do
        "${agent_command[@]}" &
        agent=$!
        [[ -z $stopping ]] || end "$agent" # asked to before its number was known
        wait_for "$agent"
        [[ -z $stopping ]] || break
        echo "with-agent: the agent ended; it is started again in $agent_pause_s s" >&2
        sleep "$agent_pause_s" &
        wait $!
    done
}

rm -f "$socket"
keep_agent &
keeper=$!
engine=
trap 'stopping=1; end "$engine"' TERM INT
while [[ ! -S $socket && -z $stopping ]] && ((SECONDS < agent_wait_s)); do
    sleep 0.1 &
    wait $!
done
[[ -S $socket || -n $stopping ]] || echo "with-agent: no agent after $agent_wait_s s; the engine starts without" >&2

code=0
if [[ -z $stopping ]]; then
    "$@" &
    engine=$!
    [[ -z $stopping ]] || end "$engine"
    wait_for "$engine"
    code=$?
fi
end "$keeper"
wait_for "$keeper"
exit "$code"
