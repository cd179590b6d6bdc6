import CMLXH2O
import Foundation
import MLX
import MLXLMCommon

/// A file behind a conversation's memory: rows are written to it, evicted or not, and evicted rows that
/// are wanted again come back from it.
///
/// The file has the rows of those layers to which rows come back: with a profile these are few. It is
/// scratch: it has no name, and goes with the conversation's caches or with the process, in whatever way
/// that ends. A saved conversation (``H2OKVCache/saveCaches(_:to:metadata:)``) does not have it.
///
/// A step waits for the disk only where rows come faster than it takes them. On Apple's systems the file is
/// readable from the first time that the device is unlocked. If anything goes wrong the conversation goes
/// on without it: ``H2OKVCache/spillFailure``.
public struct H2OSpill: Sendable, Equatable {
    /// Where the files lie; it is made if there is none.
    public var folder: URL
    /// Tokens from one return to the next while decoding. Rows also come back before a prompt chunk.
    public var every: Int
    /// How many of the last queries say what is wanted.
    public var window: Int
    /// Pages of 16 tokens whose rows are read for a KV head at each return, and as many behind them.
    public var pages: Int
    /// Rows that come back to a KV head at each return, at most.
    public var rows: Int
    /// The part of a head's evictable slots that these may take, above 0 to 1.
    public var room: Double
    /// How many of the following rows a wanted row makes wanted, too.
    public var ahead: Int

    /// - Throws: ``H2OError/configuration(_:)`` for numbers out of range.
    public init(
        folder: URL = usualFolder, every: Int = 32, window: Int = 8, pages: Int = 12,
        rows: Int = 64, room: Double = 0.5, ahead: Int = 16
    ) throws {
        (self.folder, self.every, self.window, self.pages) = (folder, every, window, pages)
        (self.rows, self.room, self.ahead) = (rows, room, ahead)
        try validate()
    }

    /// `mlx-h2o/rows` in the caches folder.
    public static var usualFolder: URL {
        let caches = FileManager.default.urls(for: .cachesDirectory, in: .userDomainMask).first
        return (caches ?? FileManager.default.temporaryDirectory)
            .appendingPathComponent("mlx-h2o/rows")
    }

    /// Throw ``H2OError/configuration(_:)`` for numbers out of range, or a folder that is none.
    public func validate() throws {
        guard folder.isFileURL else {
            throw H2OError.configuration("The folder of a spill is a file URL; got \(folder).")
        }
        _ = try EngineSpill(self, layers: 1)
    }

    /// Tokens whose rows are written together (`kBlockPositions` of the engine).
    private static let together = 8
    /// Bytes of an element of a query that is kept.
    private static let querySize = 2

    /// What a KV head of a layer to which rows come back holds in memory for the file: the rows of tokens
    /// that do not fill a block yet, as they came; two blocks as they are stored, of which one is the
    /// writer's; and the last queries of its query heads.
    ///
    /// - Parameters:
    ///   - widths: Of its rows.
    ///   - queries: Query heads whose queries are kept, for each of the layer's KV heads.
    func bytes(of widths: RowWidths, queries: Double) -> FileBytes {
        let dense = widths.key * widths.keySize + widths.value * widths.valueSize
        let last = Double(window * widths.key * Self.querySize) * queries
        return FileBytes(
            constant: (Self.together - 1) * dense + Int(last.rounded(.up)),
            waiting: 2 * Self.together, returning: rows)
    }

    /// In the engine's terms.
    fileprivate var returns: mlx_h2o_returns {
        var returns = mlx_h2o_returns_default()
        returns.every = Int32(clamping: every)
        returns.window = Int32(clamping: window)
        returns.pages = Int32(clamping: pages)
        returns.rows = Int32(clamping: rows)
        returns.ahead = Int32(clamping: ahead)
        returns.room = room
        return returns
    }

    /// Make the folder, which other users cannot read. What is in it cannot be read before the device was
    /// unlocked once; that is set of a folder that is there already, too.
    ///
    /// On other systems than Apple's the engine makes it.
    ///
    /// - Returns: That it could not be done. Where there is no file in the end
    ///   ``H2OKVCache/spillFailure`` says so, too.
    func makeFolder() -> [H2ONotice] {
        #if canImport(Darwin)
            // Files get the protection of their folder.
            let protection: [FileAttributeKey: Any] = [
                .protectionKey: FileProtectionType.completeUntilFirstUserAuthentication
            ]
            do {
                try FileManager.default.createDirectory(
                    at: folder, withIntermediateDirectories: true,
                    attributes: protection.merging([.posixPermissions: 0o700]) { $1 })
                try FileManager.default.setAttributes(protection, ofItemAtPath: folder.path)
            } catch {
                let message =
                    "The folder \(folder.path) for files of rows cannot be made, or not be protected "
                    + "until the device is unlocked: \(error.localizedDescription)"
                return [H2ONotice(subject: .spill, message: message)]
            }
        #endif
        return []
    }
}

/// The file of a conversation as the engine holds it, for as long as one of its caches lives.
final class EngineSpill {
    let handle: mlx_h2o_spill

    /// Nothing is made on disk yet.
    ///
    /// - Throws: ``H2OError/configuration(_:)`` for numbers out of range.
    init(_ spill: H2OSpill, layers: Int) throws {
        var (made, returns) = (mlx_h2o_spill_new(), spill.returns)
        try checkEngine(mlx_h2o_spill_make(&made, spill.folder.path, layers, &returns))
        handle = made
    }

    deinit { mlx_h2o_spill_free(handle) }

    /// Why there is no file, or why it gets no more rows; nil while all is well.
    var failure: String? {
        var why: UnsafePointer<CChar>?
        guard mlx_h2o_spill_failure(&why, handle) == 0, let why else {
            return String(cString: mlx_h2o_last_error())
        }
        return why.pointee == 0 ? nil : String(cString: why)
    }
}

/// A cache's part in the file of its conversation.
struct SpilledLayer {
    let spill: EngineSpill
    /// Which of the file's layers it is.
    let layer: Int
    /// Whether rows come back to each KV head; nil: to all.
    let returning: [Bool]?
}

extension Engine {
    /// Has its rows go into a file, before the first ones come.
    func spill(to file: SpilledLayer) throws {
        guard let returning = file.returning else {
            return try checkEngine(
                mlx_h2o_cache_spill_to(handle, file.spill.handle, file.layer, nil, 0))
        }
        try checkEngine(
            mlx_h2o_cache_spill_to(
                handle, file.spill.handle, file.layer, returning, returning.count))
    }

    /// Rows that came back so far, over all KV heads.
    var rowsReturned: Int {
        get throws {
            var count: Int64 = 0
            try checkEngine(mlx_h2o_cache_returned(&count, handle))
            return Int(count)
        }
    }
}

extension H2OConfiguration {
    /// The parts of a model's bounded layers in one new file, where there is to be one; nil for a layer
    /// to which no rows come back.
    func spilledLayers(
        _ kinds: [LayerKind], of model: any LanguageModel, _ attends: Bool
    ) throws -> [SpilledLayer?]? {
        guard let spill, attends else { return nil }
        let heads = try profile(of: model, kinds)?.retrievalHeads
        let written = kinds.indices.filter { heads?[$0].contains(true) ?? true }
        guard !written.isEmpty else { return nil }
        let file = try EngineSpill(spill, layers: written.count)
        var layers = [SpilledLayer?](repeating: nil, count: kinds.count)
        for (layer, kind) in written.enumerated() {
            layers[kind] = SpilledLayer(spill: file, layer: layer, returning: heads?[kind])
        }
        return layers
    }

    /// Layers with what they hold for the file, where there is to be one.
    ///
    /// - Parameters:
    ///   - kinds: The model's plain caches.
    ///   - heads: The KV heads of each to which rows come back; nil: to all.
    func filed(_ kinds: [LayerKind], returningTo heads: [[Bool]]?) -> [LayerKind] {
        guard let spill else { return kinds }
        return kinds.indices.map { layer in
            let kind = kinds[layer], asking = heads?[layer]
            guard asking?.contains(true) ?? true else { return kind }
            let part = asking.map { Double($0.filter(\.self).count) / Double(kind.heads) } ?? 1
            return kind.filed(spill.bytes(of: kind.widths, queries: part * Double(kind.group)))
        }
    }

    /// Make the folder of the file, where there is to be one.
    ///
    /// - Returns: What to say where that cannot be, or there cannot be a file.
    func readyToSpill(in model: String, _ attends: Bool) -> [H2ONotice] {
        guard let spill else { return [] }
        if attends { return spill.makeFolder() }
        let message =
            "There is no file behind the memory of \(model): it attends by itself, so that evicted "
            + "rows could not come back."
        return [H2ONotice(subject: .spill, message: message)]
    }
}
