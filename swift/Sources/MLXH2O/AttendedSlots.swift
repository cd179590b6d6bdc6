import MLX

/// What the queries of a step attend to in one run: its slots in use, and the rows of a chunk that
/// goes over budget.
struct AttendedSlots {
    let run: Run
    /// `[B, heads, N, ...]` by name, without the recent window's.
    var fields: Fields
    /// Tokens that each head has lost.
    let evicted: Int
    /// After attention: scores of the recent window `[B, heads, its length]`, where there is one.
    var newestScores: MLXArray?
    /// After attention: the mass `[B, heads, N and the recent window's]` of the prompt's last queries.
    var windowMass: MLXArray?

    /// N.
    var count: Int { fields["positions"]!.dim(2) }

    /// One head of the run.
    func head(_ i: Int) -> AttendedSlots {
        let own = i ..< i + 1
        var one = Run(first: run.first + i, last: run.first + i + 1, budget: run.budget)
        one.length = run.length
        return AttendedSlots(
            run: one, fields: fields.mapValues { $0.sliced(own, axis: 1) }, evicted: evicted,
            windowMass: windowMass?.sliced(own, axis: 1))
    }

    /// The rows at some slots `[B, heads, M]` of the heads.
    func rows(at places: MLXArray) -> Fields {
        fields.mapValues { field in
            let ones = Array(repeating: 1, count: field.ndim - 3)
            let shape = places.shape + field.shape.dropFirst(3)
            return takeAlong(
                field, broadcast(places.reshaped(places.shape + ones), to: shape), axis: 2)
        }
    }
}

extension Layer {
    /// What is attended to, run by run.
    ///
    /// - Parameter overflow: Rows of a chunk that goes over budget, `[B, H, L, ...]` by name.
    func attended(_ overflow: Fields? = nil) -> [AttendedSlots] {
        store.runs.map { attended($0, overflow) }
    }

    /// The same of one run.
    func attended(_ run: Run, _ overflow: Fields? = nil) -> AttendedSlots {
        let fields: Fields
        if let new = overflow?.mapValues({ $0.sliced(run.range, axis: 1) }) {
            fields =
                run.length == 0
                ? new : store.views(run).merging(new) { concatenated([$0, $1], axis: 2) }
        } else {
            fields = store.views(run)
        }
        let held = fields["positions"]!.dim(2) + recentlyHeld
        return AttendedSlots(run: run, fields: fields, evicted: offset - held)
    }

    /// All rows of a run: those attended to in slots, then the recent window's.
    func keysAndValues(_ attended: AttendedSlots) -> (keys: Rows, values: Rows) {
        let keys = settings.packing.rows("keys", attended.fields)
        let values = settings.packing.rows("values", attended.fields)
        guard let window else { return (keys, values) }
        let views = window.views(attended.run.range, offset: offset)
        return (window.rows("keys", keys, views), window.rows("values", values, views))
    }

    /// The same of the fields that policies work on; positions as slots store them.
    func positionsAndScores(_ attended: AttendedSlots) -> Fields {
        guard let window else { return attended.fields }
        let views = window.views(attended.run.range, offset: offset)
        return ["positions", "scores", "value_lengths"].reduce(into: Fields()) { whole, name in
            if let field = attended.fields[name] {
                whole[name] = concatenated([field, views[name]!], axis: 2)
            }
        }
    }
}
