import CMLXH2O
import Foundation
import MLX
import MLXLMCommon

extension H2OSpill {
    /// Record the state of a conversation beside the file of its rows, from which it goes on later: before
    /// the app goes to the background, or ends.
    ///
    /// Waits until the state and all rows are on the disk. Call it between two tokens; the caches go on.
    ///
    /// - Parameter caches: Those of a model, all of its layers, of a configuration whose ``keeps`` is true.
    /// - Returns: Where the file is, for ``resumedCaches(from:for:pressure:)``. nil: nothing is recorded,
    ///   since no token has come, the file is not to stay, or it has failed
    ///   (``H2OKVCache/spillFailure``).
    /// - Throws: ``H2OError/state(_:)`` for caches that have no file, or not all one; another ``H2OError``
    ///   for some of a file's caches only, or in another order.
    public static func recordState(of caches: [any KVCache]) throws -> URL? {
        let layers = placedMembers(of: caches).map { $0.cache as? H2OKVCache }
        guard let spill = layers.first??.file?.spill,
            layers.allSatisfy({ $0?.file?.spill === spill })
        else {
            throw H2OError.state(
                "These caches are not all of one file of rows: pass those of one model, made with "
                    + "H2OConfiguration(spill: H2OSpill(keeps: true)). Copied and loaded caches have "
                    + "no file.")
        }
        let bounded = layers.compactMap { $0 }
        guard bounded.allSatisfy({ $0.spillFailure == nil }),
            bounded.contains(where: { $0.offset > 0 })
        else { return nil }
        let engines = bounded.compactMap(\.engine)
        guard try spill.record(engines) else { return nil }
        return try spill.place
    }

    /// The caches of a conversation as they were at the newest record of its state. They go on in the file,
    /// which gets their further rows and stays.
    ///
    /// ``H2OKVCache/offset`` says how many tokens they have seen; those that came after are to be given
    /// again. They are bounded as they were, whatever the configuration is now. Files that Python keeps
    /// (`Spill(keep=True)`) are gone on with, too.
    ///
    /// - Parameters:
    ///   - url: What ``recordState(of:)`` gave. Let the caches before go first: a file is one conversation's.
    ///   - model: The model that is to go on with them.
    ///   - pressure: What may ask for less memory while the caches are in use.
    ///   - seal: What opens a sealed file, with the key that sealed it.
    /// - Throws: ``H2OError/file(_:)`` for a file that is missing, in use, damaged, sealed with another key,
    ///   without a record, or another model's, and for caches with a policy of an app's own.
    public static func resumedCaches(
        from url: URL, for model: any LanguageModel, pressure: H2OMemoryPressure? = nil,
        seal: H2OSeal? = nil
    ) throws -> [any KVCache] {
        guard url.isFileURL else {
            throw H2OError.file("The place of a file of rows is a file URL; got \(url).")
        }
        let plain = try H2OConfiguration.default.plainCaches(of: model)
        let (spill, engines) = try EngineSpill.resumed(
            at: url, layers: placedMembers(of: plain).count, seal)
        let share = PressureShare(pressure, PressureAgreement())
        do {
            let bounded = try engines.enumerated().map {
                try H2OKVCache(
                    resumed: $1, in: SpilledLayer(spill: spill, layer: $0, returning: nil), share)
            }
            let caches = replacingMembers(of: plain, with: bounded)
            try H2OKVCache.checkFit(caches, model)
            return caches
        } catch {
            throw H2OError.file(EngineSpill.refusal(of: url) + ": \(error.localizedDescription)")
        }
    }
}

extension EngineSpill {
    /// Whether the state of all layers' caches is recorded.
    fileprivate func record(_ engines: [Engine]) throws -> Bool {
        let stream = StreamOrDevice.default
        var recorded = false
        try withExtendedLifetime((stream, engines)) {
            try checkEngine(
                mlx_h2o_spill_record(
                    &recorded, handle, engines.map(\.handle), engines.count, stream.ctx))
        }
        return recorded
    }

    /// Where the file is; nil before it is made.
    fileprivate var place: URL? {
        get throws {
            var path: UnsafePointer<CChar>?
            try checkEngine(mlx_h2o_spill_path(&path, handle))
            guard let path, path.pointee != 0 else { return nil }
            return URL(fileURLWithPath: String(cString: path))
        }
    }

    /// A file that a conversation goes on in, and its caches.
    fileprivate static func resumed(
        at url: URL, layers: Int, _ seal: H2OSeal?
    ) throws -> (spill: EngineSpill, engines: [Engine]) {
        _ = installedEvaluator
        let stream = StreamOrDevice.default
        var made = mlx_h2o_spill_new()
        var caches = (0 ..< layers).map { _ in mlx_h2o_cache_new() }
        try withExtendedLifetime(stream) {
            let status: Int32
            if var functions = seal?.functions {
                status = mlx_h2o_spill_resume_sealed(
                    &made, &caches, layers, url.path, &functions, stream.ctx)
            } else {
                status = mlx_h2o_spill_resume(&made, &caches, layers, url.path, stream.ctx)
            }
            try checkEngine(status, saved: refusal(of: url))
        }
        return (EngineSpill(resumed: made), caches.map { Engine(resumed: $0) })
    }

    fileprivate static func refusal(of url: URL) -> String {
        "The conversation in \(url.lastPathComponent) cannot be gone on with"
    }
}
