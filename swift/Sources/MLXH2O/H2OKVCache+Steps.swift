import MLX

/// The steps of a cache: write, attend, accumulate, choose.
extension H2OKVCache {
    /// Store new rows, or hold them back where the budget is exceeded.
    func takeIn(keys: MLXArray, values: MLXArray) {
        start(keys, values)
        yieldToPressure()
        let isOne = keys.dim(2) == 1  // for which victims are named already
        if !isOne { briefDecodings = 0 }
        let rows =
            recent == nil
            ? rows(keys, values, from: offset)
            : recent!.push(keys: keys, values: values, offset: offset)
        offset += keys.dim(2)
        guard let rows else { return }
        let count = rows["positions"]!.dim(2)
        if isOne {
            writeOne(rows)
        } else if store!.runs.allSatisfy({ $0.length + count <= $0.budget }) {
            append(rows)
        } else {
            pending = rows
        }
    }

    /// Make the store when the first rows tell the widths.
    func start(_ keys: MLXArray, _ values: MLXArray) {
        precondition(unnamed == nil, "The state of this cache was set without its metaState.")
        let types = RowTypes(keys: keys, values: values)
        if let rowTypes {
            precondition(
                rowTypes == types, "This cache holds rows of \(rowTypes); \(types) came.")
            return
        }
        for dtype in [keys.dtype, values.dtype] {
            precondition(
                [.float32, .float16, .bfloat16].contains(dtype),
                "Keys and values must be float32, float16 or bfloat16; got \(dtype).")
        }
        let given: [Int]
        do {
            var (budgets, reserved) = try resolvedBudgets(types)
            fullBudgets = budgets
            given = budgets.map { $0 + reserved }
            if packing.recent != nil {
                let size = try recentSize(budgets)
                recent = RecentZone(
                    size: size, kept: packing, isScored: policy.needsAttention)
                budgets = budgets.map { $0 - size }
            }
            store = SlotStore(budgets: budgets, reserved: reserved)
        } catch {
            fatalError(
                error.localizedDescription + " (H2OConfiguration.caches(for:) tells in time.)")
        }
        // The file's form of a size that depends on widths: the slots of each head.
        if case .heads = size {
        } else {
            size = .heads(given)
        }
        rowTypes = types
        remainder = Remainder(
            batch: types.batch, heads: types.heads, keyWidth: types.keyWidth,
            valueWidth: types.valueWidth)
        if recent != nil {
            // So that there are fields to look at while all tokens are recent.
            let row = rows(
                keys.sliced(0 ..< 1, axis: 2), values.sliced(0 ..< 1, axis: 2), from: 0)
            store!.reserve(1, like: row)
        }
    }

    /// New rows by field, `[B, H, L, ...]`, for the positions from `first` on.
    func rows(_ keys: MLXArray, _ values: MLXArray, from first: Int) -> Fields {
        let (B, H, L) = (keys.dim(0), keys.dim(1), keys.dim(2))
        var rows = packing.fields("keys", .plain(keys))
        rows.merge(packing.fields("values", .plain(values))) { $1 }
        rows["positions"] = broadcast(positions(first ..< first + L), to: [B, H, L])
        if policy.needsAttention {
            rows["scores"] = MLXArray.zeros([B, H, L], dtype: .float32)
        }
        return rows
    }

    /// Store one row per head: into the next unused slot, or over a victim, which is folded.
    private func writeOne(_ rows: Fields) {
        store!.reserve(1, like: rows)
        let B = rowTypes!.batch
        var index: [MLXArray] = [], overwritten: [Float] = []
        for (i, run) in store!.runs.enumerated() {
            let full = run.length == run.budget
            overwritten += Array(repeating: full ? 1 : 0, count: run.heads)
            if full {
                let next = policy.options.evictEvery - run.victims
                let slots = victims!.sliced(run.range, axis: 1).sliced(next ..< next + 1, axis: 2)
                index.append(store!.flatIndex(run, slots).squeezed(axis: -1))
                store!.runs[i].victims -= 1
            } else {
                let slots = store!.nextIndex(run, 1).squeezed(axis: -1)
                index.append(broadcast(slots, to: [B, run.heads]))
                store!.runs[i].length += 1
            }
        }
        var flat = joined(index, axis: 1)
        if overwritten.contains(1) && remembers {
            let weights =
                overwritten.contains(0)
                ? MLXArray(overwritten, [1, overwritten.count, 1]) : nil
            var old: Fields = [:]
            for name in rows.keys where name != "positions" && name != "scores" {
                old[name] = store!.take(flat, name).expandedDimensions(axis: 2)
            }
            remainder = remainder!.fold(
                keys: packing.rows("keys", old).dense, values: packing.rows("values", old).dense,
                weights: weights)
            // Read before written: a row still to be read would make the write copy everything.
            flat = depends(input: flat, dependencies: remainder!.arrays)
        }
        store!.put(flat, rows.mapValues { $0.squeezed(axis: 2) })
    }

    /// Store a chunk's rows in unused slots.
    private func append(_ rows: Fields) {
        let L = rows["positions"]!.dim(2)
        store!.reserve(L, like: rows)
        let index = store!.runs.map { store!.nextIndex($0, L).reshaped([1, -1]) }
        store!.put(joined(index, axis: 1), rows.mapValues { $0.flattened(start: 1, end: 2) })
        for i in store!.runs.indices { store!.runs[i].length += L }
    }

    /// All fields of the slots that a run attends to, `[B, heads, N, ...]`.
    func attendedFields(_ run: Run) -> Fields {
        guard let pending else { return store!.views(run) }
        let new = pending.mapValues { $0.sliced(run.range, axis: 1) }
        if run.length == 0 { return new }
        return store!.views(run).merging(new) { concatenated([$0, $1], axis: 2) }
    }

    /// What `update` hands out to stock attention.
    func fetch() -> (MLXArray, MLXArray) {
        let run = store!.runs[0], fields = attendedFields(run), reserved = store!.reserved
        let keys = fields["keys"]!, values = fields["values"]!
        guard reserved > 0 && evicted(run) > 0 else { return (keys, values) }
        let rows = remainder!.plainRows(reserved)
        if pending != nil {
            return (
                concatenated([rows.keys.asType(keys.dtype), keys], axis: 2),
                concatenated([rows.values.asType(values.dtype), values], axis: 2)
            )
        }
        let own = broadcast(positions(-reserved ..< 0), to: [run.heads, reserved])
        store!.put(
            store!.flatIndex(run, own).reshaped([1, -1]),
            [
                "keys": rows.keys.flattened(start: 1, end: 2),
                "values": rows.values.flattened(start: 1, end: 2),
            ])
        return (
            store!.view(run, "keys", withReserved: true),
            store!.view(run, "values", withReserved: true)
        )
    }

    /// Attention of one run: output, new scores, and the mass of the prompt's window.
    func attend(
        _ run: Run, _ fields: Fields, queries: MLXArray, scale: Float, mask: Mask, sinks: MLXArray?
    ) -> (output: MLXArray, scores: MLXArray?, windowMass: MLXArray?) {
        let (keys, values) = keysAndValues(run, fields)
        let whole = positionsAndScores(run, fields)
        let L = queries.dim(2), N = keys.shape[2]
        let answering =
            remainderAnswers && evicted(run) > 0 ? remainder!.heads(run.range) : nil
        let looks = policy.needsAttention
        let windowed = looks && L > 1 && policy.options.prompt == .window
        // Queries before this one are attended to and not looked at.
        let firstSeen = windowed ? L - min(policy.options.window, L) : (looks ? 0 : L)

        func operands(_ range: Range<Int>) -> AttentionOperands {
            let block = mask.block(range, L: L, N: N, own: true)
            let q = queries.sliced(range, axis: 2)
            return AttentionOperands(
                queries: q, keys: keys.sliced(0 ..< block.keys, axis: 2),
                values: values.sliced(0 ..< block.keys, axis: 2), scale: scale, mask: block.mask,
                sinks: sinks,
                seed: answering.map { ($0.column(queries: q, scale: scale), $0.meanValue) })
        }

        var outputs: [MLXArray] = [], scores = whole["scores"], windowMass: MLXArray?
        if firstSeen > 0 {
            outputs.append(Backend.current.attention(operands(0 ..< firstSeen)))
        }
        // A window is one block, and so is whatever leaves no logits behind.
        let sums = type(of: policy).sumsMass
        let step = windowed || sums ? L : Reference.queryBlock
        for start in stride(from: firstSeen, to: L, by: step) {
            let call = operands(start ..< min(start + step, L)), length = call.keys.shape[2]
            let seen: Observation
            if sums {
                let result = Backend.current.attentionWithMass(call)
                outputs.append(result.output)
                seen = Observation(mass: result.mass)
            } else {
                let result = Backend.current.attentionWithScores(call)
                outputs.append(result.output)
                seen = Observation(
                    logits: result.scores, logSumExp: result.logSumExp, heads: run.heads)
            }
            if windowed {
                windowMass = self.windowMass(seen, whole, L)
                seen.standsFor = standsFor(L: L, N: N, window: min(start + step, L) - start)
            }
            let part = policy.accumulate(scores!.slicedLast(0 ..< length), seen: seen)
            scores =
                length < N
                ? concatenated([part, scores!.slicedLast(length ..< N)], axis: -1) : part
        }
        return (joined(outputs, axis: 2), scores, windowMass)
    }

    /// Mass of the last `window` queries of the whole prompt, `[B, H, N]`.
    ///
    /// A chunk shorter than the window lacks queries of earlier chunks; each slot's mean mass per
    /// step stands in for them.
    private func windowMass(_ seen: Observation, _ fields: Fields, _ L: Int) -> MLXArray {
        let missing = policy.options.window - L
        if missing <= 0 { return seen.mass }
        let ages = maximum(Int32(offset - L) - fields["positions"]!, Int32(1)).asType(.float32)
        return seen.mass + Float(missing) * policy.meanMass(fields["scores"]!, ages: ages)
    }

    /// After attention: write scores back or reduce a chunk, then choose the next victims.
    ///
    /// - Parameters:
    ///   - attended: Per run the fields of all slots attended to, scores brought up to date.
    ///   - windowMasses: Per run the window's mass of a prompt chunk.
    func settle(_ attended: [Fields], _ windowMasses: [MLXArray?] = []) {
        let runs = store!.runs, counts = attended.map { $0["positions"]!.dim(2) }
        if pending != nil || zip(counts, runs).contains(where: { $0 > $1.budget }) {
            pending = nil
            let kept = runs.indices.map { i in
                reduced(
                    runs[i], attended[i], windowMasses.isEmpty ? nil : windowMasses[i],
                    evicted: offset - recentlyHeld - counts[i])
            }
            store!.replace(kept)
            forgetVictims()
        } else if policy.needsAttention {
            store!.write("scores", attended.map { $0["scores"]! })
        }
        chooseVictims()
    }

    /// The rows of a run that stay within its budget; the others are folded.
    private func reduced(
        _ run: Run, _ fields: Fields, _ windowMass: MLXArray?, evicted: Int
    ) -> Fields {
        if fields["positions"]!.dim(2) <= run.budget { return fields }
        let N = fields["positions"]!.dim(2), places = fields["positions"]!
        // Head by head, so that float32 copies are never of more than one head's rows.
        let priorities = (0 ..< run.heads).map { i in
            var one = Run(first: run.first + i, last: run.first + i + 1, budget: run.budget)
            one.length = run.length
            let own = i ..< i + 1
            let slots = slots(one, fields.mapValues { $0.sliced(own, axis: 1) }, evicted: evicted)
            return policy.promptPriority(slots, windowMass: windowMass?.sliced(own, axis: 1))
                .slicedLast(0 ..< N)
        }
        let kept = Selection.kept(
            priority: joined(priorities, axis: 1), positions: places,
            evictable: evictable(run, places), count: run.budget, unit: policy.options.unit)
        if remembers {
            let dropped = putAlong(
                MLXArray.ones(places.shape, dtype: .float32), kept,
                values: MLXArray.zeros(kept.shape, dtype: .float32), axis: -1)
            let keys = packing.rows("keys", fields), values = packing.rows("values", fields)
            for i in 0 ..< run.heads {
                let own = i ..< i + 1, head = run.first + i
                remainder = remainder!.withHeads(
                    head,
                    remainder!.heads(head ..< head + 1).fold(
                        keys: keys.sliced(own, axis: 1).dense,
                        values: values.sliced(own, axis: 1).dense,
                        weights: dropped.sliced(own, axis: 1)))
            }
        }
        return fields.mapValues { field in
            let places = kept.reshaped(kept.shape + Array(repeating: 1, count: field.ndim - 3))
            let shape = Array(kept.shape) + field.shape.dropFirst(3)
            return takeAlong(field, broadcast(places, to: shape), axis: 2)
        }
    }

    /// For every full run without victims left, choose the next `evictEvery`.
    func chooseVictims() {
        if let recent, recent.length < recent.size { return }  // the next token pushes none out
        func due(_ run: Run) -> Bool { run.length == run.budget && run.victims == 0 }
        guard store!.runs.contains(where: due) else { return }
        let count = policy.options.evictEvery
        var chosen: [MLXArray] = []
        for (i, run) in store!.runs.enumerated() {
            if due(run) {
                let slots = slots(run, store!.views(run), evicted: evicted(run))
                chosen.append(
                    Selection.victims(
                        priority: policy.priority(slots).slicedLast(0 ..< run.length),
                        positions: slots.positions.slicedLast(0 ..< run.length),
                        evictable: slots.evictable.slicedLast(0 ..< run.length), count: count,
                        unit: policy.options.unit))
                store!.runs[i].victims = count
            } else if let victims {
                chosen.append(victims.sliced(run.range, axis: 1))
            } else {
                chosen.append(
                    MLXArray.zeros([rowTypes!.batch, run.heads, count], dtype: .int32))
            }
        }
        victims = joined(chosen, axis: 1)
    }

    /// Have every full run choose anew.
    func forgetVictims() {
        victims = nil
        for i in store!.runs.indices { store!.runs[i].victims = 0 }
    }

    /// A run's slots as policies see them.
    private func slots(_ run: Run, _ fields: Fields, evicted: Int) -> Slots {
        let whole = positionsAndScores(run, fields), places = whole["positions"]!
        let (keys, values) = keysAndValues(run, fields)
        return Slots(
            keys: keys.dense, values: values.dense, positions: places,
            scores: whole["scores"] ?? MLXArray.zeros(places.shape, dtype: .float32),
            offset: offset,
            evictable: evictable(run, places), evicted: evicted,
            evictedMeanKey: remainder!.meanKey.sliced(run.range, axis: 1))
    }

    /// True where a run may lose the token.
    private func evictable(_ run: Run, _ places: MLXArray) -> MLXArray {
        Selection.evictable(
            positions: places, offset: offset, sink: policy.options.sink,
            recent: policy.recentSlots(budget(of: run)))
    }

    /// All rows of a run: those of its slots, by field, and the newest tokens'.
    private func keysAndValues(_ run: Run, _ fields: Fields) -> (keys: Rows, values: Rows) {
        let keys = packing.rows("keys", fields), values = packing.rows("values", fields)
        guard let recent else { return (keys, values) }
        let views = recent.views(run.range, offset: offset)
        return (recent.rows("keys", keys, views), recent.rows("values", values, views))
    }

    /// The same of the fields that policies work on.
    func positionsAndScores(_ run: Run, _ fields: Fields) -> Fields {
        guard let recent else { return fields }
        let views = recent.views(run.range, offset: offset)
        return ["positions", "scores"].reduce(into: Fields()) { whole, name in
            if let field = fields[name] {
                whole[name] = concatenated([field, views[name]!], axis: 2)
            }
        }
    }

    /// Tokens that each head of a run has lost.
    func evicted(_ run: Run) -> Int {
        offset - run.length - recentlyHeld - (pending?["positions"]!.dim(2) ?? 0)
    }

    /// Tokens in the recent zone.
    private var recentlyHeld: Int { recent?.length ?? 0 }

    /// Tokens that each head of a run may hold, the newest included.
    func budget(of run: Run) -> Int { run.budget + (recent?.size ?? 0) }

    /// Tokens that every head protects, for the recent zone.
    private func recentSize(_ budgets: [Int]) throws -> Int {
        let size = budgets.map { policy.recentSlots($0) }.min()!
        guard size >= 1 else {
            throw H2OError.configuration(
                "recentBits needs protected tokens: policy \"\(type(of: policy).name)\" protects "
                    + "none in a head of \(budgets.min()!) slots.")
        }
        return size
    }

    /// Fit the recent zone to new budgets of whole heads; the budgets of their other slots.
    func resizeRecent(_ budgets: [Int]) throws -> [Int] {
        let first = offset - recentlyHeld
        if var gone = recent!.resize(try recentSize(budgets)) {
            let shape = Array(gone["keys"]!.shape[0 ..< 3])
            gone["positions"] = broadcast(positions(first ..< first + shape[2]), to: shape)
            pending = gone
        }
        return budgets.map { $0 - recent!.size }
    }

    /// How many tokens plain rows will stand for when n new ones attend.
    func evictedAfter(_ n: Int) -> Int {
        guard let run = heldStore?.runs[0] else { return 0 }
        return n == 1 ? offset + 1 - min(run.length + 1, run.budget) : evicted(run)
    }

    /// log(n / R) on the plain rows' columns, minus infinity on the future.
    func plainRowsMask(_ n: Int, kept: Int) -> MLXArray {
        let rows = store!.reserved, dtype = rowTypes!.keyDType
        let kept = n == 1 ? min(kept, store!.runs[0].budget - 1) : kept
        let bias = log(MLXArray(Float(Double(evictedAfter(n)) / Double(rows))))
        var mask = concatenated(
            [broadcast(bias, to: [rows]), MLXArray.zeros([kept + n], dtype: .float32)])
        if n > 1 {
            let lowest = Float(dtype.finfo!.min)
            let future = positions(0 ..< kept + n) .> positions(kept ..< kept + n).column
            let hidden = zeroPadded(
                which(future, lowest, Float(0)), axis: 1, before: rows, after: 0)
            mask = maximum(mask + hidden, lowest)
        }
        return broadcast(mask, to: [1, 1, n, rows + kept + n]).asType(dtype)
    }

    /// Arrays that must be evaluated with the output, or the graph grows from step to step.
    func sideState() -> [MLXArray] {
        namedArrays.filter { $0.name != "slots.keys" && $0.name != "slots.values" }.map(\.array)
    }
}

/// How many of a chunk's L queries each of a window's queries stands for, per slot `[N]`.
///
/// Every old slot was seen by all L queries and by `window` of them in the window; new row j by
/// L - j and by min(window, L - j).
func standsFor(L: Int, N: Int, window: Int) -> MLXArray {
    let old = Array(repeating: Float(Double(L) / Double(window)), count: N - L)
    let new = (0 ..< L).map { Float(L - $0) / Float(min(L - $0, window)) }
    return MLXArray(old + new)
}
