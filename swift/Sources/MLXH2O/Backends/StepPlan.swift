import MLX

/// What one KV head does in a decode step.
struct HeadPlan: Equatable {
    /// Its first slot in the flat buffers.
    let start: Int
    /// Its slots in use, the new one included.
    let length: Int
    /// Which of its named victims makes room, or -1 while there are unused slots.
    let victim: Int
    /// How many of the last positions are protected.
    let recent: Int
    /// Tokens it has lost, this step's victim included.
    let evicted: Int
    /// Whether the next victims are to be named.
    let choose: Bool
}

/// What a layer does in a decode step.
struct StepPlan: Equatable {
    /// The next logical position; the new token's is one less.
    let offset: Int
    /// S, of the flat buffers.
    let slots: Int
    /// How many of the first positions are protected.
    let sink: Int
    /// Victims named at once.
    let evictEvery: Int
    /// Each KV head's part.
    let heads: [HeadPlan]
    /// The position from which ages count.
    var agedFrom = 0

    var ranges: Ranges { Ranges(starts: heads.map(\.start), lengths: heads.map(\.length)) }

    /// Slots that all heads attend to.
    var attended: Int { heads.reduce(0) { $0 + $1.length } }

    /// Whether any head names its next victims.
    var chooses: Bool { heads.contains(where: \.choose) }

    /// The plan's integers, in the layout of metal/decode_step.h.
    var integers: [Int32] {
        var integers = [offset, slots, attended, heads.count, evictEvery, sink, agedFrom, 0]
        var before = 0
        for head in heads {
            integers += [
                head.start, head.length, before, head.recent, head.victim, head.choose ? 1 : 0, 0,
                0,
            ]
            before += head.length
        }
        return integers.map(Int32.init)
    }
}
